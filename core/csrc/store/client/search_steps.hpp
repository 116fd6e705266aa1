// SearchSteps: how a client reads from other nodes what its own node has not, as a state machine: answers in,
// questions out. It has no socket, thread or clock: Client drives it over its connections, and the simulator
// of tests/sim over a simulated network.
//
//   kMembers --members()--> kLocate or kRead --located()--> kRead --answered() of each node, then
//   all_answered()--> kLocate ... kDone
//
// In the first round a key of which the place is known is read there without a question to the master, which
// also works while the master is away. A holder that fails, that has not got the object or whose bytes are
// damaged is followed by the next.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/result.hpp"
#include "directory/requests.hpp"
#include "store/client/holders.hpp"

namespace moonpool {

inline constexpr int64_t kMiss = -1;
inline constexpr int64_t kDamagedRead = -2;  // came over TCP, and does not match its checksum

class SearchSteps {
   public:
    enum class Wants : uint8_t { kMembers, kLocate, kRead, kDone };

    // sizes: what the own node answered for each key; found ones are not looked for, and what is found is
    // written there. It outlives this object, as `place` and `locations` do.
    SearchSteps(std::vector<Hash128> keys, const OwnPlace& place, LocationCache& locations,
                std::vector<int64_t>& sizes);

    Wants wants() const { return wants_; }

    // kMembers: the last list of members that there was.
    void members(const Result<std::shared_ptr<const Members>>& answer);

    // kLocate: holders of these keys are asked for.
    const std::vector<Hash128>& question() const { return question_; }
    void located(const Result<LocateAnswer>& answer);

    // kRead: each of these nodes is asked for its items, at the same time.
    std::vector<NodeItems>& nodes() { return nodes_; }
    // The sizes that one of them gave. Calls for different nodes may run at the same time.
    void answered(const NodeItems& node, const Result<std::vector<int64_t>>& sizes);
    void all_answered();

   private:
    void assign(const Member& member, size_t item);
    void begin_round(const Members* known);
    void finish_round();

    std::vector<Hash128> keys_;
    const OwnPlace& place_;
    LocationCache& locations_;
    std::vector<int64_t>& sizes_;
    Wants wants_ = Wants::kMembers;
    size_t round_ = 0;
    // Of each key the nodes that were asked: none is asked again, but for damaged bytes that no other node
    // has.
    std::vector<std::vector<NodeId>> tried_;
    std::vector<size_t> unknown_;  // the items of question_
    std::vector<Hash128> question_;
    std::map<Incarnation, NodeItems> assigned_;
    std::vector<NodeItems> nodes_;
};

}  // namespace moonpool
