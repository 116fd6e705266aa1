// The half of ObjectTable that knows what each object is: commit, pins, groups, soft pins, and the ends of
// objects. object_table_eviction.cpp has the order in which they go.
//
// The rule that both halves keep: after each change of what may be evicted (a pin, a child, a member of its
// group, its soft pin) the object is settled (settle), which puts it into the list that it now belongs to;
// before last_used changes it is taken out of its list (unlist), as lists and sets are ordered by it.
//
// A slot has a state (kSlot in the header) and two kinds of holds. Pins are readers: they count as use and
// keep the object out of every eviction list. Retains keep the bytes while the SSD tier writes them; they
// do not change the eviction order. A slot is freed by whichever comes last: the end of visibility
// (retire), the last pin, or the last release. The generation tells two objects in one slot apart; every
// hold that comes from outside names it.
#include "store/node/object_table.hpp"

#include <algorithm>

namespace moonpool {

ObjectTable::ObjectTable(IndexWriter index, ExtentAllocator& allocator, Leases& leases)
    : index_(std::move(index)),
      allocator_(allocator),
      leases_(leases),
      objects_(static_cast<Object*>(std::calloc(index_.slots(), sizeof(Object)))),
      group_states_(static_cast<GroupState*>(std::calloc(index_.slots(), sizeof(GroupState)))),
      versions_(static_cast<Version*>(std::calloc(index_.slots(), sizeof(Version)))) {}

// The shared index has room for short names; the whole of a longer one is kept here.
std::string_view ObjectTable::name(uint32_t slot) const {
    const IndexEntry& e = index_.entry(slot);
    if (auto it = long_names_.find(slot); it != long_names_.end()) return it->second;
    return std::string_view(e.name, e.name_size);
}

uint32_t ObjectTable::find(uint32_t space, const Hash128& hash, std::string_view wanted) const {
    for (uint32_t slot = index_.first(hash); slot != kNoSlot; slot = index_.next(slot)) {
        const IndexEntry& e = index_.entry(slot);
        if (e.hash_low == hash.low && e.hash_high == hash.high && e.space == space && name(slot) == wanted) {
            return slot;
        }
    }
    return kNoSlot;
}

uint32_t ObjectTable::find(const Hash128& hash) const {
    for (uint32_t slot = index_.first(hash); slot != kNoSlot; slot = index_.next(slot)) {
        const IndexEntry& e = index_.entry(slot);
        if (e.hash_low == hash.low && e.hash_high == hash.high) return slot;
    }
    return kNoSlot;
}

ObjectTable::Commit ObjectTable::commit(uint32_t space, const Hash128& hash, std::string_view object_name,
                                        Extent extent, uint32_t crc, uint32_t parent, bool replace,
                                        const RetentionHints& hints, Version version) {
    uint32_t old = find(space, hash, object_name);
    if (old != kNoSlot && !replace) return Commit::kExists;
    // Room first, so that a refusal leaves the old generation where it is.
    auto full = [&] { return free_slots_.empty() && used_ == index_.slots(); };
    // With no free slot, the object that is replaced gives up its own, unless a reader or a write to the
    // SSD still holds it.
    bool old_makes_room = old != kNoSlot && objects_[old].pins == 0 && objects_[old].retains == 0;
    while (full() && !old_makes_room) {
        uint64_t before = counters_.evicted_total;
        if (!evict_one()) return Commit::kNoSlot;
        counters_.evicted_for_slots_total += counters_.evicted_total - before;
    }
    if (old != kNoSlot && !committed(old)) old = kNoSlot;  // it was evicted with its group
    // From here on nothing can refuse. The SSD tier forgets the key first, so that a crash or a read in
    // between finds no old bytes of it.
    if (replace && on_replace_) on_replace_(hash);
    // Not told to the directory: this node still holds the key, in a moment with other bytes.
    if (old != kNoSlot) retire(old, false);
    if (parent != kNoSlot && !committed(parent)) parent = kNoSlot;  // it was evicted or replaced just now
    uint32_t slot;
    if (!free_slots_.empty()) {
        slot = free_slots_.back();
        free_slots_.pop_back();
    } else {
        slot = used_++;
    }
    Object& o = objects_[slot];
    o = Object{};
    o.generation = ++generation_;
    versions_[slot] = version;
    o.last_used = ++clock_;
    o.state.move_to(SlotState::kCommitted);
    o.parent = kNoSlot;
    bool has_state = hints.group != Hash128{} || hints.soft_ms != 0;
    if (has_state) group_states_[slot] = GroupState{};
    if (hints.group != Hash128{}) join(slot, hints.group);
    if (hints.soft_ms != 0) {
        o.soft = true;
        group_states_[slot].soft_ms = hints.soft_ms;
        pin_softly(slot);
    }
    if (parent != kNoSlot) {
        o.parent = parent;
        // The parent is remembered by slot and generation: when it is gone, and its slot another object's,
        // this object simply has no parent.
        o.parent_generation = objects_[parent].generation;
        ++objects_[parent].children;
        if (o.group != nullptr && o.group == objects_[parent].group)
            ++group_states_[parent].children_in_group;
        settle(parent, false);
    }
    if (object_name.size() > kInlineName) long_names_.emplace(slot, object_name);
    // The object becomes visible to clients that read the shared index. Everything they may read of it
    // stands there before.
    index_.publish(slot, o.generation, space, hash, object_name, extent, crc);
    if (in_space_.size() <= space) in_space_.resize(space + 1);
    ++in_space_[space];
    if (delta_log_ != nullptr) delta_log_->push(hash, Tier::kDram, true);
    if (listener_) listener_(space, hash, object_name, true);
    ++counters_.objects;
    counters_.object_bytes += extent.size;
    settle(slot, true);
    // Last: the SSD tier may begin to write the object, which retains it.
    if (on_commit_) on_commit_(slot);
    return Commit::kStored;
}

void ObjectTable::tell_again(uint32_t slot) {
    const IndexEntry& e = index_.entry(slot);
    if (delta_log_ != nullptr) delta_log_->push(Hash128{e.hash_low, e.hash_high}, Tier::kDram, true);
}

// A use of one member is a use of its group. The caller settles the object.
void ObjectTable::use(uint32_t slot) {
    Object& o = objects_[slot];
    unlist(standing(slot));
    if (o.group != nullptr) unlist_member(slot);
    o.last_used = ++clock_;
    o.used = true;
    if (o.soft && !o.soft_now && o.state == SlotState::kCommitted) pin_softly(slot);
    // Of a group only the first member stands in a list, so it carries the age of the whole group.
    objects_[standing(slot)].last_used = clock_;
}

void ObjectTable::touch(uint32_t slot) {
    use(slot);
    settle(slot, true);
}

// The first pin takes an object out of the eviction order, the last unpin puts it back, as one that
// was used until now.
void ObjectTable::pin(uint32_t slot) {
    if (objects_[slot].pins++ == 0) {
        ++counters_.pinned;
        counters_.pinned_bytes += extent(slot).size;
    }
    use(slot);
    settle(slot, true);
}

void ObjectTable::unpin(uint32_t slot, uint64_t generation) {
    Object& o = objects_[slot];
    // A pin of an object that has gone since, or an unpin too many: a client's mistake must not release
    // another object.
    if (o.generation != generation || o.pins == 0) return;
    if (--o.pins != 0) return;
    --counters_.pinned;
    counters_.pinned_bytes -= extent(slot).size;
    if (o.state == SlotState::kDetached) {
        // A write to the SSD still reads the bytes; release() frees the slot.
        if (o.retains != 0) return;
        --counters_.detached;
        free_slot(slot);
    } else {
        use(slot);  // it was in use until now
        settle(slot, true);
    }
}

void ObjectTable::retain(uint32_t slot) {
    Object& o = objects_[slot];
    if (o.retains++ == 0 && o.group != nullptr) ++o.group->retained;
}

void ObjectTable::release(uint32_t slot, uint64_t generation) {
    Object& o = objects_[slot];
    if (o.generation != generation || o.retains == 0 || --o.retains != 0) return;
    if (o.group != nullptr) --o.group->retained;
    if (o.state != SlotState::kDetached || o.pins != 0) return;
    --counters_.detached;
    free_slot(slot);
}

std::string_view ObjectTable::parent_name(uint32_t slot) const {
    const Object& o = objects_[slot];
    bool known = o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation;
    return known ? name(o.parent) : std::string_view();
}

// Saved: an SSD has the same bytes, so that eviction loses nothing. Only a committed object counts;
// saved_bytes is part of what the SSD tier regards as clean.
void ObjectTable::set_saved(uint32_t slot, bool saved) {
    Object& o = objects_[slot];
    if (o.saved == saved || o.state != SlotState::kCommitted) return;
    o.saved = saved;
    uint64_t bytes = extent(slot).size;
    counters_.saved_bytes = saved ? counters_.saved_bytes + bytes : counters_.saved_bytes - bytes;
}

// tell: the directory. A replaced object is here again in a moment, and must not seem gone meanwhile.
void ObjectTable::retire(uint32_t slot, bool tell) {
    Object& o = objects_[slot];
    set_saved(slot, false);
    unpin_softly(slot);
    leave(slot);
    unlist(slot);
    if (delta_log_ != nullptr && tell) {
        const IndexEntry& e = index_.entry(slot);
        delta_log_->push(Hash128{e.hash_low, e.hash_high}, Tier::kDram, false);
    }
    if (listener_ && tell) {
        const IndexEntry& e = index_.entry(slot);
        listener_(e.space, Hash128{e.hash_low, e.hash_high}, name(slot), false);
    }
    // Clients that read the index miss it from now on. Those that found it before hold a pin, or notice by
    // the entry's sequence that it has changed.
    index_.retract(slot);
    --counters_.objects;
    counters_.object_bytes -= extent(slot).size;
    if (o.pins != 0 || o.retains != 0) {
        o.state.move_to(SlotState::kDetached);
        ++counters_.detached;
    } else {
        free_slot(slot);
    }
}

// The extent goes back, and the parent may become a leaf. A generation of 0 says that none of its pins is
// valid.
void ObjectTable::free_slot(uint32_t slot) {
    Object& o = objects_[slot];
    forget_parent(slot);
    leases_.free(extent(slot));
    long_names_.erase(slot);
    o.state.move_to(SlotState::kFree);
    o.generation = 0;
    free_slots_.push_back(slot);
    // The space can be closed when its last object has gone; detached objects count, because clients read
    // them by their space.
    uint32_t space = index_.entry(slot).space;
    if (--in_space_[space] == 0 && on_space_empty_) on_space_empty_(space);
}

void ObjectTable::forget_parent(uint32_t slot) {
    Object& o = objects_[slot];
    uint32_t parent = o.parent;
    o.parent = kNoSlot;
    if (parent == kNoSlot) return;
    Object& p = objects_[parent];
    // The parent went before the child: then its slot is another object's, which must not lose a child it
    // does not have.
    if (p.generation != o.parent_generation) return;
    --p.children;
    settle(parent, false);
}

// ---- groups

// Members stand in a ring (GroupState::after, before). The first one stands in the eviction order for all, so
// that a join, a leave and a pin cost the same in a group of 1,000 as in one of two.
void ObjectTable::join(uint32_t slot, const Hash128& id) {
    Group& group = groups_[id];
    // More members than may go in one step of the loop: this object stays by itself.
    if (group.members == kGroupMembersMax) return;
    Object& o = objects_[slot];
    if (group.members++ == 0) {
        group.id = id;
        group.first = group_states_[slot].after = group_states_[slot].before = slot;
    } else {
        GroupState& first = group_states_[group.first];
        group_states_[slot].after = group.first;
        group_states_[slot].before = first.before;
        group_states_[first.before].after = slot;
        first.before = slot;
        unlist(group.first);  // settle() of this one lists it anew
        objects_[group.first].last_used = clock_;
    }
    o.group = &group;
}

void ObjectTable::leave(uint32_t slot) {
    Object& o = objects_[slot];
    Group* group = o.group;
    if (group == nullptr) return;
    unlist(group->first);
    unlist_member(slot);
    if (o.blocks) --group->blocked;
    if (o.retains != 0) --group->retained;
    o.blocks = false;
    o.group = nullptr;
    uint32_t parent = o.parent;
    bool known = parent != kNoSlot && objects_[parent].generation == o.parent_generation;
    // Children in the same group do not keep a parent from going, since the group goes as a whole. This
    // child will be in no group, and so keeps it from now on.
    if (known && objects_[parent].group == group) --group_states_[parent].children_in_group;
    if (--group->members == 0) {
        groups_.erase(group->id);
        return;
    }
    const GroupState& place = group_states_[slot];
    group_states_[place.before].after = place.after;
    group_states_[place.after].before = place.before;
    if (group->first == slot) {
        group->first = place.after;
        Object& first = objects_[group->first];
        // The next member stands for the group, and inherits the group's age.
        first.last_used = std::max(first.last_used, o.last_used);
    }
    settle(known && objects_[parent].group == group ? parent : group->first, false);
}

std::vector<uint32_t> ObjectTable::group_members(uint32_t slot) const {
    std::vector<uint32_t> others;
    if (objects_[slot].group == nullptr) return others;
    for (uint32_t at = group_states_[slot].after; at != slot; at = group_states_[at].after)
        others.push_back(at);
    return others;
}

// ---- soft pins

void ObjectTable::pin_softly(uint32_t slot) {
    Object& o = objects_[slot];
    GroupState& state = group_states_[slot];
    state.soft_until = now_ms_ + state.soft_ms;
    o.soft_now = true;
    o.used = false;
    soft_pins_.emplace(state.soft_until, slot);
    if (o.group != nullptr) ++o.group->soft;
}

void ObjectTable::unpin_softly(uint32_t slot) {
    Object& o = objects_[slot];
    if (!o.soft_now) return;
    soft_pins_.erase({group_states_[slot].soft_until, slot});
    o.soft_now = false;
    if (o.group != nullptr) --o.group->soft;
}

void ObjectTable::on_time(uint64_t now_ms) {
    constexpr int kEndsMax = 4096;  // in one go; the rest with the next tick
    now_ms_ = now_ms;
    for (int i = 0; i < kEndsMax && !soft_pins_.empty() && soft_pins_.begin()->first <= now_ms; ++i) {
        uint32_t slot = soft_pins_.begin()->second;
        // A soft pin is renewed for its whole time when the object was used during it; otherwise the object
        // goes to the ordinary order.
        bool used = objects_[slot].used;
        unpin_softly(slot);
        if (used) pin_softly(slot);
        settle(slot, false);
    }
}

// Recounts everything from the slots and compares with what is kept: O(n log n), for tests and for the
// operator's check.
bool ObjectTable::check_integrity() const {
    std::vector<uint32_t> children(used_, 0), children_in_group(used_, 0);
    std::unordered_map<const Group*, Group> groups;
    uint64_t soft = 0;
    std::vector<Extent> extents;
    std::vector<uint32_t> in_space(in_space_.size());
    uint64_t committed = 0, bytes = 0, saved = 0, detached = 0, listed = 0, alone = 0;
    uint64_t pinned = 0, pinned_bytes = 0;
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == SlotState::kFree) continue;
        ++in_space[index_.entry(slot).space];
        if (extent(slot).size != 0) extents.push_back(extent(slot));
        if (o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation) {
            ++children[o.parent];
            if (o.group != nullptr && o.group == objects_[o.parent].group) ++children_in_group[o.parent];
        }
        if (o.soft_now) {
            ++soft;
            if (!soft_pins_.contains({group_states_[slot].soft_until, slot})) return false;
        }
        if (o.pins != 0) {
            ++pinned;
            pinned_bytes += extent(slot).size;
        }
        // A detached object exists for its readers alone: no list, no group, no soft pin, not saved.
        if (o.state == SlotState::kDetached) {
            ++detached;
            if ((o.pins == 0 && o.retains == 0) || o.listed || o.saved) return false;
            if (o.group != nullptr || o.soft_now) return false;
            continue;
        }
        ++committed;
        bytes += extent(slot).size;
        if (o.saved) saved += extent(slot).size;
        const IndexEntry& e = index_.entry(slot);
        if (find(e.space, Hash128{e.hash_low, e.hash_high}, name(slot)) != slot) return false;
        if (e.seq.load() != 2 * o.generation) return false;
    }
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == SlotState::kFree) continue;
        if (o.children != children[slot]) return false;
        if (o.group != nullptr && group_states_[slot].children_in_group != children_in_group[slot])
            return false;
        bool goes = may_go(slot);
        if (o.group == nullptr) {
            if (o.listed != goes) return false;
            continue;
        }
        if (o.blocks == goes || group_states_[group_states_[slot].after].before != slot ||
            objects_[group_states_[slot].after].group != o.group) {
            return false;
        }
        if (group_states_[slot].listed != may_go_alone(slot)) return false;
        alone += group_states_[slot].listed;
        Group& books = groups[o.group];
        ++books.members;
        books.blocked += o.blocks;
        books.retained += o.retains != 0;
        books.soft += o.soft_now;
        if (o.listed != (o.group->first == slot && o.group->blocked == 0)) return false;
    }
    for (const auto& [group, books] : groups) {
        auto it = groups_.find(group->id);
        if (it == groups_.end() || &it->second != group || group->members > kGroupMembersMax) return false;
        if (books.members != group->members || books.blocked != group->blocked) return false;
        if (books.retained != group->retained || books.soft != group->soft) return false;
        if (group_members(group->first).size() + 1 != group->members) return false;
    }
    if (groups.size() != groups_.size() || soft != soft_pins_.size()) return false;
    uint32_t before = kNoSlot;
    for (uint32_t slot = oldest_member_; slot != kNoSlot; slot = group_states_[slot].newer) {
        if (!group_states_[slot].listed || group_states_[slot].older != before || alone-- == 0) return false;
        before = slot;
    }
    if (before != newest_member_ || alone != 0) return false;
    // Each list: doubly linked without a break, each object in the one that it belongs to, ages rising but
    // for those in the tree.
    for (uint8_t which = 0; which < orders_.size(); ++which) {
        for (auto [used, slot] : orders_[which].out_of_order) {
            const Object& o = objects_[slot];
            if (!o.listed || !o.out_of_order || o.order != which || o.order != order_of(slot)) return false;
            if (o.last_used != used || ++listed > used_) return false;
        }
        uint32_t previous = kNoSlot;
        for (uint32_t slot = orders_[which].oldest; slot != kNoSlot; slot = objects_[slot].newer) {
            const Object& o = objects_[slot];
            if (!o.listed || o.out_of_order || o.order != which || o.order != order_of(slot)) return false;
            if (o.older != previous || ++listed > used_) return false;
            previous = slot;
        }
        if (previous != orders_[which].newest) return false;
    }
    std::sort(extents.begin(), extents.end(), [](Extent a, Extent b) { return a.offset < b.offset; });
    for (size_t i = 1; i < extents.size(); ++i) {
        if (extents[i].offset < extents[i - 1].end()) return false;
    }
    return committed == counters_.objects && bytes == counters_.object_bytes &&
           saved == counters_.saved_bytes && detached == counters_.detached && pinned == counters_.pinned &&
           pinned_bytes == counters_.pinned_bytes && in_space == in_space_ && leases_.check_integrity();
}

}  // namespace moonpool
