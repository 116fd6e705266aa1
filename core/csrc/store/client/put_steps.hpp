// PutSteps: in which order a put asks the own node and others, as a state machine: answers in, questions out.
// PlaceSteps: which other nodes it asks. Neither has a socket, thread or clock: Client drives them over its
// connections, and the simulator of tests/sim over a simulated network.
//
//   kRemove --> kPutWanted --> kSpill --> kPutHere --> kPutElsewhere --> kDone
//
// A replacement begins with its place in the order of removals, and with the removal of what is older
// elsewhere, so no client reads an old copy after a new one; what stands between is a miss. The own node
// replaces its own; it is told to remove it where the new one is wanted elsewhere. Steps that a put does not
// need are passed over, and the first that takes all items is the last. The caller ends the replacement
// (RemovalSteps::kEnd) then.
#pragma once

#include <memory>
#include <vector>

#include "base/result.hpp"
#include "directory/requests.hpp"
#include "store/client/holders.hpp"

namespace moonpool {

// A unique put of a key that the master has at a node which does not have it, as one that was removed some
// milliseconds ago: so often it is asked, after waits of twice the length each. The last attempt replaces:
// the master is wrong then.
inline constexpr size_t kUniqueAttempts = 6;
constexpr uint64_t unique_wait_ms(size_t attempt) { return uint64_t{5} << (attempt - 1); }

class PutSteps {
   public:
    enum class Wants : uint8_t {
        kRemove,        // what is older, at other nodes; and at the own one, if removes_here()
        kPutWanted,     // at the nodes that the caller named
        kSpill,         // at others with free memory, if the own node has none
        kPutHere,       // at the own node
        kPutElsewhere,  // wherever it is taken
        kDone,
    };
    struct Plan {
        bool replace = false, ack = true;
        bool own_wanted = false, elsewhere_wanted = false;  // what the caller named first
    };

    PutSteps(size_t items, const Plan& plan);

    Wants wants() const { return wants_; }
    const std::vector<size_t>& left() const { return left_; }  // that no node has taken yet
    bool removes_here() const { return plan_.elsewhere_wanted; }

    void removed() { after_removal(); }
    void removed(std::vector<size_t> left) {  // some stay as they are
        left_ = std::move(left);
        after_removal();
    }
    void put(std::vector<size_t> left);  // of any step that puts

   private:
    void after_removal();
    void go_to(Wants next);

    Plan plan_;
    Wants wants_ = Wants::kDone;
    std::vector<size_t> left_;
};

class PlaceSteps {
   public:
    enum class Wants : uint8_t { kPlace, kMembers, kPut, kDone };

    // evict: after the nodes with free memory also those that would have to evict.
    PlaceSteps(std::vector<size_t> items, const Incarnation& own, std::shared_ptr<const Members> members,
               bool evict);

    Wants wants() const { return wants_; }
    const std::vector<size_t>& left() const { return left_; }

    // kPlace: the master is asked for one node for what is left.
    const PlaceOptions& where() const { return where_; }
    void placed(const Result<std::vector<NodeId>>& answer);
    // kMembers: a fresh list, as the node has joined a moment ago.
    void members(const Result<std::shared_ptr<const Members>>& answer);
    // kPut: this node is asked to take what is left. left: that it did not take.
    const Member& node() const { return node_; }
    void put(std::vector<size_t> left);

   private:
    void ask_again();
    void next_kind();

    std::vector<size_t> left_;
    std::shared_ptr<const Members> members_;
    bool evict_;
    PlaceOptions where_;
    size_t attempts_ = 0;
    Member node_;
    NodeId chosen_ = kNoNode;
    Wants wants_ = Wants::kPlace;
};

}  // namespace moonpool
