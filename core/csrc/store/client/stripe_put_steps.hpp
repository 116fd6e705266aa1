// SpreadSteps: which nodes are asked to take which stripes of an object, and what of that stays.
// StripePutSteps: the order in which a striped object is put. Both are state machines: answers in, questions
// out. Neither has a socket, thread or clock: Client drives them over its connections, and the simulator of
// tests/sim over a simulated network.
//
//   SpreadSteps     kPut --put() of each node, all_put()--> kPut ... kSpread --confirm()--> kConfirm
//                                                                 --kept() of each node, all_kept()--> kDone
//   StripePutSteps  kLook --> kWhole --> kLookAgain --> kSpread --> kElsewhere --> kConfirm --> kManifest
//                                                                              --> kFree --> kDone
//
// The manifest is put when each stripe was found at as many nodes as copies are wanted, or at all that take
// one. Copies of a stripe go to nodes of different hosts first, then to other nodes of those. The nodes are
// asked in rounds, each node once for each stripe. A put that fails removes the stripes that it placed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "directory/types.hpp"
#include "store/client/holders.hpp"
#include "store/client/standing.hpp"
#include "store/shared/messages.hpp"

namespace moonpool {

class SpreadSteps {
   public:
    enum class Wants : uint8_t { kPut, kSpread, kConfirm, kDone };
    using Places = std::vector<std::vector<size_t>>;  // of each stripe, by number in nodes()

    // Nodes that may take stripes.
    static std::vector<NodeItems> takers(const Members& members);
    // at: where each stripe is already.
    SpreadSteps(std::vector<NodeItems> nodes, Places at, uint32_t copies);

    Wants wants() const { return wants_; }

    // kPut: each node is asked to take its items, at the same time; kConfirm: whether it has them. One
    // without items is not asked.
    std::vector<NodeItems>& nodes() { return nodes_; }
    // What one of them said of one of its items; true: it has the stripe. One call at a time.
    bool put(const NodeItems& node, size_t item, PutOutcome outcome);
    void all_put();
    // kSpread: stripes that no node took; the caller may put them elsewhere.
    std::vector<size_t> left() const;
    void confirm();
    // What one of them has of its items. One call at a time. True: all.
    bool kept(const NodeItems& node, const Result<std::vector<uint8_t>>& flags);
    void all_kept() { wants_ = Wants::kDone; }

    const Places& at() const { return at_; }

   private:
    void next_round();
    size_t number(const NodeItems& node) const { return static_cast<size_t>(&node - nodes_.data()); }

    std::vector<NodeItems> nodes_;
    Places at_, tried_;
    uint32_t copies_;
    size_t rounds_ = 0;
    Wants wants_ = Wants::kPut;
};

class StripePutSteps {
   public:
    enum class Wants : uint8_t {
        kLook,       // whether the key is there
        kWhole,      // whether what is there, of a manifest's size, is whole
        kLookAgain,  // whether it is there still
        kSpread,     // the stripes, at nodes in turn
        kElsewhere,  // those that none took
        kConfirm,    // that all are there
        kManifest,   // put it: the key may lead to them
        kFree,       // remove the stripes
        kDone,
    };

    explicit StripePutSteps(bool replace)
        : replaces_(replace), wants_(replace ? Wants::kSpread : Wants::kLook) {}

    Wants wants() const { return wants_; }

    // kLook, kLookAgain.
    void looked(const Result<std::vector<Presence>>& here, bool is_manifest_sized);
    void whole(Presence is);
    // kSpread, kElsewhere, kConfirm. left: stripes that no node took. elsewhere: of each stripe whether
    // another node took it.
    void spread(std::span<const size_t> left);
    void put_elsewhere(std::vector<uint8_t> elsewhere);
    void confirmed(const SpreadSteps::Places& at);
    // kManifest: as a replacement?
    bool replaces() const { return replaces_; }
    void manifest_put(PutOutcome outcome);
    void freed() { wants_ = Wants::kDone; }

    // kDone.
    PutOutcome outcome() const { return outcome_; }
    bool was_there() const { return was_there_; }  // nothing was put
    // On how many nodes each stripe is at least.
    size_t copies() const { return copies_; }

   private:
    bool replaces_;
    Wants wants_;
    PutOutcome outcome_ = PutOutcome::kRefused;
    bool was_there_ = false;
    std::vector<uint8_t> elsewhere_;
    size_t copies_ = 0;
};

}  // namespace moonpool
