// MemberViews: one list of members from those of several masters. Each master numbers the nodes by itself;
// here each life of a node has one number, by which all answers name it. Pure: a client and the simulator use
// it.
//
// In all() a node has the best state that any master in touch gives it: it can be asked. Whether it may be
// read for a key is the word of the master of that key's range: Members::state(member, hash). of(range) has
// the nodes that this range's master lists, as it sees them, under the same numbers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "directory/types.hpp"

namespace moonpool {

class MemberViews {
   public:
    explicit MemberViews(uint32_t ranges) : heard_(ranges) {}

    // That range's list as its master told it last; in_touch: it answers. A list that is older than the last
    // one is not looked at.
    void hear(uint32_t range, const std::shared_ptr<const Members>& list, bool in_touch);

    const std::shared_ptr<const Members>& all();  // null: no master was ever heard
    // Its `before`: those that the range's former master knew. A client that never heard that one has the
    // nodes that other ranges list instead.
    std::shared_ptr<const Members> of(uint32_t range);

    // The number of a life, once it was on a list that was heard.
    std::optional<NodeId> number(const Incarnation& life) const;
    // The number that a range's master gives to it; none: it does not list the node.
    std::optional<NodeId> number_at(uint32_t range, NodeId number) const;

    bool check_integrity() const;

   private:
    struct Heard {
        std::shared_ptr<const Members> list;
        std::map<Incarnation, NodeId> ids{};  // as this list numbers the lives
        std::set<Incarnation> listed{};       // now or before, of those that any range lists
        bool in_touch = false;
    };

    void rebuild();
    std::shared_ptr<const Members> others(std::set<Incarnation> seen) const;
    void number_lives();

    std::vector<Heard> heard_;
    bool changed_ = false;
    uint64_t epoch_ = 0;
    std::shared_ptr<const Members> all_;
    std::map<Incarnation, NodeId> numbers_;
    std::map<NodeId, Incarnation> lives_;
    NodeId next_ = 0;
};

}  // namespace moonpool
