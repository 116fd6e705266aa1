// ObjectTable: the objects of one tenant on one node: names, life cycle, pins, chains and the order of
// eviction. Pure: no thread, no clock, no memory touched; the node's loop owns it.
//
//   free --commit--> committed --remove, replace or evict--> free              (nothing reads it)
//                        \----------------------------> detached --last reader--> free
//
// Invariants (check_integrity):
//   - only committed objects are linked in the index, exactly once;
//   - an object is in the eviction list exactly when it is committed, has no pin and no cached child: a
//     chain goes leaf first. Of a group the first member stands there for all, when that holds for each of
//     them (but for children in the group itself), so that all go or none;
//   - soft-pinned objects, and groups with one, stand in a list of their own, which comes after the other;
//   - a member that could go but for its group is in a third list, for when nothing else can go: a group is
//     broken up rather than in the way of what is new. So some object can go as long as not all are pinned;
//   - children counts the committed or detached objects of which this object is the parent, by its slot and
//     its generation;
//   - the extents of committed and detached objects are disjoint.
//
// Costs: commit, pin, unpin and touch are O(1) but for the index; an object that becomes evictable far from
// the ends of its list goes to a tree instead (out_of_order), O(log n). An eviction looks at 256 objects at
// most.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/state.hpp"
#include "directory/delta_log.hpp"
#include "directory/version.hpp"
#include "memory/leases.hpp"
#include "store/node/handed_node.hpp"
#include "store/shared/shared_index.hpp"

namespace moonpool {

struct TableCounters {
    uint64_t objects = 0;
    uint64_t object_bytes = 0;
    uint64_t detached = 0;
    uint64_t pinned = 0;
    uint64_t pinned_bytes = 0;
    uint64_t evicted_total = 0;
    uint64_t evicted_bytes_total = 0;
    uint64_t evicted_unsaved_total = 0;    // that no SSD had
    uint64_t evicted_for_slots_total = 0;  // for the number of objects, not for memory
    uint64_t saved_bytes = 0;              // of committed objects that an SSD has too
};

// What a put asks of the order of eviction.
struct RetentionHints {
    Hash128 group{};       // of objects that go together; zero: none
    uint32_t soft_ms = 0;  // goes after all others, while it is used that often; 0: no
};

inline constexpr uint32_t kGroupMembersMax =
    1024;  // they go in one step of the loop; more stay by themselves

enum class SlotState : uint8_t { kFree, kCommitted, kDetached };

inline constexpr Transitions<SlotState, 3> kSlot{
    "slot",
    {
        {SlotState::kFree, "free", {SlotState::kCommitted}},
        {SlotState::kCommitted, "committed", {SlotState::kDetached, SlotState::kFree}},
        {SlotState::kDetached, "detached", {SlotState::kFree}},
    }};
static_assert(kSlot.is_complete());

class ObjectTable {
   public:
    enum class Commit { kStored, kExists, kNoSlot };

    ObjectTable(IndexWriter index, ExtentAllocator& allocator, Leases& leases);

    // Told of every object that becomes visible, or no longer is; nullptr: there is none.
    void set_delta_log(DeltaLog* log) { delta_log_ = log; }
    // The same with names, for subscribers; mostly there are none. Of a space by its number.
    using Listener = std::function<void(uint32_t space, const Hash128&, std::string_view name, bool added)>;
    void set_listener(Listener f) { listener_ = std::move(f); }
    // Told of every key that is replaced, once that can no longer be refused and before its new object is
    // visible.
    void set_on_replace(std::function<void(const Hash128&)> f) { on_replace_ = std::move(f); }
    // Told of a space of which the last object is gone, removed ones that are still read included.
    void set_on_space_empty(std::function<void(uint32_t space)> f) { on_space_empty_ = std::move(f); }
    uint32_t objects_in(uint32_t space) const { return space < in_space_.size() ? in_space_[space] : 0; }
    // Told of an object that is evicted while it is being written to the SSD.
    void set_on_evict_unwritten(std::function<void(const Hash128&)> f) { on_evict_unwritten_ = std::move(f); }
    // Told of every object that was committed.
    void set_on_commit(std::function<void(uint32_t slot)> f) { on_commit_ = std::move(f); }

    uint32_t find(uint32_t space, const Hash128& hash, std::string_view name) const;
    // Whatever object has that hash, by which the directory knows it.
    uint32_t find(const Hash128& hash) const;

    // Makes an object visible; the table owns the extent from then on. parent: a slot or kNoSlot. With
    // replace, an existing object of that name is removed first; without, it stays and the caller keeps the
    // extent.
    Commit commit(uint32_t space, const Hash128& hash, std::string_view name, Extent extent, uint32_t crc,
                  uint32_t parent, bool replace, const RetentionHints& hints = {}, Version version = 0);

    // Most recently used. Callers touch a chain deepest first, so that its root is the last to go.
    void touch(uint32_t slot);

    void pin(uint32_t slot);
    void unpin(uint32_t slot, uint64_t generation);

    // Keeps the bytes of an object while they are copied elsewhere; unlike a pin it does not count as a use.
    void retain(uint32_t slot);
    void release(uint32_t slot, uint64_t generation);

    void remove(uint32_t slot) { retire(slot, true); }

    // Removes the least recently used leaf without pins, with its group; of a group of which another must
    // stay, what can go, where there is nothing else. False when there is nothing.
    bool evict_one();
    // The same, passing over objects in open leases, whose memory would not come back.
    bool evict_for_memory();

    // Frees `bytes` in one piece, whose objects and those that hang on them were used the longest ago, where
    // evicting by age has left holes only. False when pinned or leased memory stands in the way everywhere.
    bool evict_window(uint64_t bytes);
    // How many whole grains could come free: neither pins nor leases have any of them. O(objects).
    uint64_t evictable_grains(uint64_t grain) const;

    bool committed(uint32_t slot) const {
        return slot < used_ && objects_[slot].state == SlotState::kCommitted;
    }
    // Committed, or removed but still pinned.
    bool readable(uint32_t slot, uint64_t generation) const {
        return slot < used_ && objects_[slot].state != SlotState::kFree &&
               objects_[slot].generation == generation;
    }
    // Told to the delta log once more.
    void tell_again(uint32_t slot);
    uint64_t generation(uint32_t slot) const { return objects_[slot].generation; }
    // It was put with; 0: none was given.
    Version version(uint32_t slot) const { return versions_[slot]; }
    uint32_t pins(uint32_t slot) const { return objects_[slot].pins; }
    const IndexEntry& entry(uint32_t slot) const { return index_.entry(slot); }
    std::string_view name(uint32_t slot) const;
    std::string_view parent_name(uint32_t slot) const;  // empty: none, or it is gone
    uint64_t last_used(uint32_t slot) const { return objects_[slot].last_used; }
    uint64_t uses() const { return clock_; }              // so far: commits, touches, pins
    uint64_t generations() const { return generation_; }  // given so far
    bool holds_memory(uint32_t slot) const {              // an object that is not free, of at least one byte
        return objects_[slot].state != SlotState::kFree && index_.entry(slot).size != 0;
    }
    uint64_t oldest_use() const {  // of the next victim
        for (const Order& order : orders_) {
            uint64_t used = order.out_of_order.empty() ? UINT64_MAX : order.out_of_order.begin()->first;
            if (order.oldest != kNoSlot) used = std::min(used, objects_[order.oldest].last_used);
            if (used != UINT64_MAX) return used;
        }
        return clock_;
    }
    uint32_t objects_max() const { return index_.slots(); }
    uint32_t slots_used() const { return used_; }  // every slot in use is below it
    const IndexWriter& index() const { return index_; }
    void publish_free_bytes(uint64_t to_come) { index_.set_free_bytes(allocator_.free_bytes() + to_come); }
    void publish_ranges(uint32_t ranges) { index_.set_ranges(ranges); }  // before any process reads it
    void publish_applied(uint32_t range, Version version) { index_.set_applied(range, version); }
    void publish_relays() { index_.set_relays(); }
    void publish_settled_bytes(uint64_t bytes) { index_.set_settled_bytes(bytes); }  // on any thread
    const TableCounters& counters() const { return counters_; }

    bool scrubbed(uint32_t slot) const { return objects_[slot].scrubbed; }
    void set_scrubbed(uint32_t slot) { objects_[slot].scrubbed = true; }

    // Whether an SSD has it too.
    bool saved(uint32_t slot) const { return objects_[slot].saved; }
    void set_saved(uint32_t slot, bool saved);

    // Tells the time: ends soft pins of what was not used.
    void on_time(uint64_t now_ms);
    bool soft_pinned(uint32_t slot) const { return objects_[slot].soft_now; }
    bool grouped(uint32_t slot) const { return objects_[slot].group != nullptr; }
    bool retained(uint32_t slot) const { return objects_[slot].retains != 0; }
    // As its put asked; a soft pin that has ended is none.
    RetentionHints hints(uint32_t slot) const {
        const Object& o = objects_[slot];
        return {.group = o.group == nullptr ? Hash128{} : o.group->id,
                .soft_ms = o.soft_now ? group_states_[slot].soft_ms : 0};
    }
    uint32_t group_size(uint32_t slot) const {
        return objects_[slot].group == nullptr ? 1 : objects_[slot].group->members;
    }
    // The other members of its group.
    std::vector<uint32_t> group_members(uint32_t slot) const;

    // ---- for another process that takes the objects over (object_table_handed.cpp)

    std::vector<HandedObject> give() const;
    // From then on no client finds an object in the shared index; until take_back().
    void supersede() { index_.supersede(used_); }
    void take_back();
    // Into an empty table, at the same slots. pins: of each slot, none for the others. An object that nothing
    // holds and no client finds is left out. An error leaves a table that is of no use.
    using HashOf = std::function<Hash128(uint32_t space, std::string_view name)>;
    Status adopt(const HandedPool& pool, const std::unordered_map<uint32_t, uint32_t>& pins,
                 const HashOf& hash);

    bool check_integrity() const;

   private:
    // Committed objects in a ring, newest last.
    struct Group {
        Hash128 id{};
        uint32_t first = kNoSlot;
        uint32_t members = 0;
        uint32_t blocked = 0;   // of them, by a pin or a child outside
        uint32_t retained = 0;  // of them, while they are copied elsewhere
        uint32_t soft = 0;      // of them, soft-pinned
    };
    struct HashOfHash {
        size_t operator()(const Hash128& hash) const { return hash.low; }
    };
    // What can be evicted, by its last use: orders_[0], and orders_[1] for what is soft-pinned.
    struct Order {
        uint32_t oldest = kNoSlot;
        uint32_t newest = kNoSlot;
        std::set<std::pair<uint64_t, uint32_t>> out_of_order;  // whose place in the list is far from its ends
    };
    // Invariants of a slot, beyond those of the table:
    //
    //   state      generation  in the index  owns its extent  pins + retains
    //   free       0           no            no               0
    //   committed  > 0         yes           yes              any
    //   detached   > 0         no            yes              > 0
    //
    //   listed, out_of_order, blocks, saved, soft_now: only while it is committed;
    //   out_of_order: only while it is listed; blocks: only of a group's member.
    struct Object {
        uint64_t generation;
        uint64_t last_used;
        uint64_t parent_generation;
        uint32_t parent;
        uint32_t older;  // eviction list: towards the next victim
        uint32_t newer;
        uint32_t children;
        uint32_t pins;
        State<kSlot> state;
        bool listed;        // in orders_[order], for itself or for its group
        bool scrubbed;      // its bytes were verified since they came to memory
        bool saved;         // an SSD has it too
        uint16_t retains;   // copies of it under way, as retain() asked for
        uint8_t order;      // 0, or 1 for what is soft-pinned; while it is listed
        bool blocks;        // a pin or a child outside keeps it, and so its whole group
        bool used;          // since its soft pin began anew
        bool soft;          // it was put with a soft pin,
        bool soft_now;      // which has not ended: it is in soft_pins_
        bool out_of_order;  // in its order's set, not in its list
        Group* group;       // nullptr: none
    };
    static_assert(sizeof(Object) <= 64, "pins and touches of many objects cost a cache line each");
    // Of an object with a group or a soft pin; of others it is never looked at.
    struct GroupState {
        uint32_t after;  // in the group's ring
        uint32_t before;
        uint32_t children_in_group;
        uint32_t soft_ms;
        uint64_t soft_until;
        uint32_t older;  // while it is listed among the members
        uint32_t newer;
        bool listed;
    };
    struct FreeMemory {
        void operator()(void* memory) const { std::free(memory); }
    };

    Extent extent(uint32_t slot) const { return Extent{index_.entry(slot).offset, index_.entry(slot).size}; }
    void settle(uint32_t slot, bool newest);
    void list(uint32_t slot, uint8_t order, bool newest);
    void unlist(uint32_t slot);
    void list_member(uint32_t slot, bool newest);
    void unlist_member(uint32_t slot);
    void use(uint32_t slot);
    uint32_t standing(uint32_t slot) const {
        return objects_[slot].group == nullptr ? slot : objects_[slot].group->first;
    }
    uint32_t known_parent(uint32_t slot) const {  // kNoSlot: none, or it is gone
        const Object& o = objects_[slot];
        bool known = o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation;
        return known ? o.parent : kNoSlot;
    }
    bool all_retained(uint32_t slot) const {  // it, or each member of its group
        const Object& o = objects_[slot];
        return o.group == nullptr ? o.retains != 0 : o.group->retained == o.group->members;
    }
    // Whether nothing but its group keeps it.
    bool may_go(uint32_t slot) const {
        const Object& o = objects_[slot];
        uint32_t inside = o.group == nullptr ? 0 : group_states_[slot].children_in_group;
        return o.state == SlotState::kCommitted && o.pins == 0 && o.children == inside;
    }
    bool may_go_alone(uint32_t slot) const {
        const Object& o = objects_[slot];
        return o.state == SlotState::kCommitted && o.pins == 0 && o.children == 0;
    }
    uint8_t order_of(uint32_t slot) const {
        const Object& o = objects_[slot];
        return o.group == nullptr ? o.soft_now : o.group->soft != 0;
    }
    void join(uint32_t slot, const Hash128& group);
    void leave(uint32_t slot);
    void pin_softly(uint32_t slot);
    void unpin_softly(uint32_t slot);
    struct Piece {
        Extent extent;
        uint32_t slot;  // kNoSlot: free already
    };
    struct VictimRank {  // in evict_window(): the smallest goes first
        uint8_t rank = 0;
        uint64_t used = 0;
        uint32_t below = 0;  // from the object down to the one that was used then
        auto operator<=>(const VictimRank&) const = default;
    };
    std::vector<VictimRank> victim_ranks() const;
    void evict_alone(uint32_t victim);
    void forget_parent(uint32_t slot);
    void adopt_hints(uint32_t slot, const HandedObject& row);
    void retire(uint32_t slot, bool tell);
    void free_slot(uint32_t slot);  // committed or detached -> free
    uint32_t first_evictable(bool for_memory) const;
    uint32_t first_of(const Order& order, bool for_memory) const;
    bool frees_memory(uint32_t slot) const;
    uint32_t first_member(bool for_memory) const;
    bool evict(uint32_t victim);

    IndexWriter index_;
    ExtentAllocator& allocator_;
    Leases& leases_;
    // calloc: pages of slots never used are never touched
    std::unique_ptr<Object[], FreeMemory> objects_;
    std::unique_ptr<GroupState[], FreeMemory> group_states_;
    std::unique_ptr<Version[], FreeMemory> versions_;  // apart: an Object has no room left in its cache line
    uint32_t used_ = 0;
    std::vector<uint32_t> free_slots_;
    std::unordered_map<uint32_t, std::string> long_names_;
    std::array<Order, 2> orders_;
    uint32_t oldest_member_ = kNoSlot, newest_member_ = kNoSlot;  // that could go but for their group
    std::unordered_map<Hash128, Group, HashOfHash> groups_;
    std::set<std::pair<uint64_t, uint32_t>> soft_pins_;  // by when they end, and slot
    uint64_t now_ms_ = 0;
    uint64_t clock_ = 0;
    uint64_t generation_ = 0;
    TableCounters counters_;
    DeltaLog* delta_log_ = nullptr;
    Listener listener_;
    std::function<void(const Hash128&)> on_replace_;
    std::function<void(const Hash128&)> on_evict_unwritten_;
    std::function<void(uint32_t)> on_commit_;
    std::function<void(uint32_t)> on_space_empty_;
    std::vector<uint32_t> in_space_;  // objects of each
};

}  // namespace moonpool
