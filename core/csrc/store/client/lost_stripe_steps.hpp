// LostStripeSteps: the end of striped objects that lack a stripe as far as the directory knows, as a state
// machine: answers in, questions out. It has no socket, thread or clock: Client drives it over its
// connections, and the simulator of tests/sim over a simulated network.
//
//   kMembers --members()--> kAsk --answered() of each node, all_answered()--> kDrop --> kFree --> kDone
//
// An object is removed for a missing stripe only when every node of the pool was asked for it and said no:
// the directory may be behind, and a node that is away may come back. Each node then removes the generation
// of the manifest that was read there, so a replacement that came meanwhile stays.
//
// The same of stripes whose manifest a client held and no longer finds: they are freed when every node of the
// pool says that it has nothing under the key (free_orphans).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "directory/types.hpp"
#include "store/client/holders.hpp"
#include "store/client/standing.hpp"
#include "store/shared/space.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

class LostStripeSteps {
   public:
    enum class Wants : uint8_t { kMembers, kAsk, kDrop, kFree, kDone };
    struct Incomplete {
        std::string_view name;
        Manifest manifest;
    };

    // What is referred to outlives this object.
    LostStripeSteps(std::vector<Incomplete> objects, const Incarnation& own, const KeyHasher& hasher,
                    LocationCache& locations);
    static LostStripeSteps free_orphans(const Incomplete& object, const Incarnation& own,
                                        const KeyHasher& hasher, LocationCache& locations);

    Wants wants() const { return wants_; }

    // kMembers: a list that is asked for now.
    void members(const Result<std::shared_ptr<const Members>>& answer);

    // kAsk: each of these nodes is asked at the same time which of the names it has, which is a use.
    std::vector<NodeItems>& nodes() { return nodes_; }
    const std::vector<std::string>& names() const { return names_; }
    // One call at a time.
    void answered(const NodeItems& node, const Result<std::vector<uint8_t>>& flags);
    void all_answered();

    // kDrop: each of the nodes removes what it has under these names, if its bytes are this manifest.
    const std::vector<Incomplete>& lost() const { return lost_; }
    void dropped();

    // kFree: the stripes of these are removed.
    const std::vector<Manifest>& freed() const { return freed_; }
    void done() { wants_ = Wants::kDone; }

    // kDone, of each object: kHit: all stripes are there after all; kMiss: one is at no node, and the object
    // is removed; kUnknown: not every node can be asked.
    const std::vector<Presence>& present() const { return present_; }

   private:
    std::vector<Incomplete> objects_, lost_;
    Incarnation own_;
    const KeyHasher& hasher_;
    LocationCache& locations_;
    bool orphans_ = false;
    Wants wants_ = Wants::kMembers;
    std::vector<NodeItems> nodes_;
    std::vector<std::string> names_;
    std::vector<Hash128> hashes_;
    std::vector<uint8_t> found_;
    bool all_answered_ = true;
    std::vector<Manifest> freed_;
    std::vector<Presence> present_;
};

}  // namespace moonpool
