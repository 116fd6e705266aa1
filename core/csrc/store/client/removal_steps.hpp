// RemovalSteps: how a client removes every copy of some keys that other nodes hold, as a state machine:
// answers in, questions out. It has no socket, thread or clock: Client drives it over its connections, and
// the simulator of tests/sim over a simulated network.
//
//   kLocate --located--> kTell --told() of each node, then all_told()--> kForget --forgotten()--> kDone
//         \--the master is away--> kMembers --members()--> kTell
//                                         \--no list either--> kDone
//
// The own node is not its business: the caller removes there first, and says with own_away that it could not.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "directory/requests.hpp"
#include "store/client/holders.hpp"
#include "store/client/recent_copies.hpp"

namespace moonpool {

class RemovalSteps {
   public:
    enum class Wants : uint8_t { kLocate, kMembers, kTell, kForget, kDone };

    RemovalSteps(std::vector<Hash128> keys, const Incarnation& own, bool own_away, LocationCache& locations,
                 RecentCopies& recent);

    Wants wants() const { return wants_; }
    const std::vector<Hash128>& keys() const { return keys_; }

    // kLocate: holders are asked for with this question.
    static LocateOptions question();
    void located(uint64_t now_ms, const Result<LocateAnswer>& answer);

    // kMembers: the last list of members that there was.
    void members(uint64_t now_ms, const Result<std::shared_ptr<const Members>>& answer);

    // kTell: each of these nodes is told to remove its items, at the same time.
    std::vector<NodeItems>& nodes() { return nodes_; }
    // What one of them said of its items, 1 for each that it had. One call at a time.
    void told(uint64_t now_ms, const NodeItems& node, const Result<std::vector<uint8_t>>& flags);
    void all_told() { wants_ = Wants::kForget; }

    // kForget: the master hears of the removal, and of the nodes that did not.
    const std::vector<NodeId>& unreached() const { return unreached_; }
    void forgotten() { wants_ = Wants::kDone; }

    // Of each key: whether a node had it.
    const std::vector<uint8_t>& removed() const { return removed_; }

   private:
    NodeItems* planned(const Member& member);
    void plan(uint64_t now_ms, const Members& known);

    std::vector<Hash128> keys_;
    Incarnation own_;
    bool own_away_;
    LocationCache& locations_;
    RecentCopies& recent_;
    Wants wants_ = Wants::kLocate;
    std::map<NodeId, NodeItems> planned_;
    std::vector<NodeItems> nodes_;
    std::vector<NodeId> unreached_;
    std::vector<uint8_t> removed_;
};

}  // namespace moonpool
