// RemovalSteps: how a client removes every copy of some keys, or every older one before it replaces them, as
// a state machine: answers in, questions out. It has no socket, thread or clock: Client drives it over its
// connections, and the simulator of tests/sim over a simulated network.
//
//   kOrder --ordered()--> kTell --told() of each node, then all_told()--> kEnd --ended()--> kDone
//        \--the master is away--> kMembers --members()--> kTell --> kDone
//                                         \--no list either--> kDone
//
// The master gives the keys their place in the order of removals first. The nodes that hold a copy are told;
// between all_told() and kEnd a replacement puts the new bytes (placed()); and the master hears which nodes
// know. It sees to it that all others drop what is older, also when this client ends half way.
//
// Two nodes at least are told of each key, also where no other node than the own one has a copy, or that one
// is away: they hand it to a new master when this one ends. A node that is told for that reason alone, a
// witness, is told while the master hears which nodes know: it has no copy, so the master need not know that
// it does.
//
// unsure() names what may still have an older copy for a while, or, without a master, until it is removed
// again.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "directory/requests.hpp"
#include "store/client/holders.hpp"
#include "store/client/recent_copies.hpp"

namespace moonpool {

class RemovalSteps {
   public:
    enum class Wants : uint8_t { kOrder, kMembers, kTell, kEnd, kDone };

    // own_too: the own node is to remove its copies, too; a replacement there needs no removal before it.
    // unique: keys that a node has stay (taken()); it ends at once where the master is away.
    RemovalSteps(std::vector<Hash128> keys, const Incarnation& own, bool own_too, LocationCache& locations,
                 RecentCopies& recent, bool unique = false);

    Wants wants() const { return wants_; }
    const std::vector<Hash128>& keys() const { return keys_; }

    // kOrder: a place in the order and the holders are asked for. placing(): where the new bytes will be;
    // null: it is a removal.
    const Incarnation* placing() const { return own_too_ ? nullptr : &own_; }
    bool unique() const { return unique_; }
    void ordered(uint64_t now_ms, const Result<OrderAnswer>& answer);
    Taken taken(size_t item) const { return taken_[item]; }
    const std::string& no_master() const { return no_master_; }  // why not; empty: it has answered

    // kMembers: the last list of members that there was.
    void members(uint64_t now_ms, const Result<std::shared_ptr<const Members>>& answer);

    // kTell: each of these nodes is told to remove its items, at the same time, and the own node all, if
    // tells_own(). versions(): of each key, copies that are older go; empty: all go.
    std::vector<NodeItems>& nodes() { return nodes_; }
    bool tells_own() const { return own_too_; }
    const std::vector<Version>& versions() const { return versions_; }
    // What one of them said of its items, 1 for each that it had. One call at a time.
    void told(uint64_t now_ms, const NodeItems& node, const Result<std::vector<uint8_t>>& flags);
    void own_told(const Result<std::vector<uint8_t>>& flags);
    void all_told();

    // The new bytes of a key are at that node.
    void placed(size_t item, NodeId node);
    void placed_here(size_t item);
    // The own node, which was to replace its copy, gave no answer; the new bytes are elsewhere, or nowhere.
    void not_answered_here(size_t item);
    // After placed(): keys whose new bytes are elsewhere, as the own node refused them. It is told to remove
    // what is older; what it says of each goes to own_removed().
    std::vector<size_t> left_here() const;
    void own_removed(std::span<const size_t> items, const Result<std::vector<uint8_t>>& flags);

    // kEnd, after placed(): nodes that are to know of their items and have no copy. They are told while the
    // master hears of the end, and before ended(). When all have answered or failed it is called again, until
    // there are none: others take the place of those that failed, once.
    std::vector<NodeItems>& witnesses();
    void witnessed(const NodeItems& node, const Result<std::vector<uint8_t>>& flags);

    // kEnd: the master hears of it. A master of the release before gave no versions: it hears of the nodes
    // that do not know.
    const OrderDone& done() const { return done_; }
    const std::vector<NodeId>& unreached() const { return unreached_; }
    void ended(const Result<std::vector<Version>>& last);
    // Of each key, after kEnd: the version of a later removal or replacement; kNoVersion: there was none.
    const std::vector<Version>& later() const { return later_; }
    // After kEnd, of a replacement: the other nodes where new bytes of these keys are that are void, as there
    // was a later one. They are told to remove what is older than later(), at the same time.
    std::vector<NodeItems> overtaken_at(std::span<const size_t> items) const;
    void overtaken_told(const NodeItems& node, const Result<std::vector<uint8_t>>& flags);

    // The master and a node know of it: the removal holds, whichever of them ends now.
    bool acknowledged() const { return acknowledged_; }
    // Of each key: whether a node had it.
    const std::vector<uint8_t>& removed() const { return removed_; }
    // How many nodes know of its removal.
    size_t know(size_t item) const;
    // Which nodes may still have which key, in words; empty: none.
    const std::string& unsure(size_t item) const { return unsure_[item]; }

   private:
    NodeItems* planned(const Member& member);
    void plan(uint64_t now_ms, std::shared_ptr<const Members> known);
    void everywhere(const Members& known);
    void doubt(size_t item, std::string_view nodes);

    std::vector<Hash128> keys_;
    Incarnation own_;
    bool own_too_, unique_;
    NodeId own_id_ = kNoNode;
    std::string own_host_;
    LocationCache& locations_;
    RecentCopies& recent_;
    Wants wants_ = Wants::kOrder;
    bool has_master_ = false, acknowledged_ = false;
    std::map<Incarnation, NodeItems> planned_;
    std::vector<NodeItems> nodes_;
    std::vector<NodeId> unreached_;
    std::vector<Version> versions_, later_;
    OrderDone done_;
    std::vector<uint8_t> removed_;
    std::vector<uint8_t> own_silent_;      // of each key: the own node was to replace it
    std::vector<uint8_t> witness_silent_;  // the same: a witness did not answer
    std::vector<size_t> witnessed_;        // the same: how many witnesses did
    std::vector<std::string> unsure_;
    std::vector<NodeItems> witnesses_;
    std::set<Incarnation> asked_witnesses_;
    int witness_rounds_ = 0;
    std::shared_ptr<const Members> members_;
    std::vector<Taken> taken_;
    std::string no_master_;
};

}  // namespace moonpool
