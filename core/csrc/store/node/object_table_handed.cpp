// The half of ObjectTable that hands its objects to another process, and takes them over there. Slots and
// generations stay: clients name objects by them, in pins, descriptors and reads that they tell of later.
//
// The order of eviction is not sent as lists. It follows from when each object was used: the successor enters
// them in that order. O(n log n), some 0.5 us for each object.
#include <algorithm>
#include <numeric>

#include "store/node/object_table.hpp"

namespace moonpool {

std::vector<HandedObject> ObjectTable::give() const {
    std::vector<HandedObject> rows;
    rows.reserve(counters_.objects + counters_.detached);
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == SlotState::kFree) continue;
        HandedObject row;
        row.slot = slot;
        row.detached = o.state == SlotState::kDetached;
        row.scrubbed = o.scrubbed;
        row.used = o.used;
        row.generation = o.generation;
        row.last_used = o.last_used;
        row.parent = known_parent(slot);
        row.parent_generation = row.parent == kNoSlot ? 0 : o.parent_generation;
        row.space = index_.entry(slot).space;
        row.extent = extent(slot);
        row.crc = index_.entry(slot).crc;
        row.version = versions_[slot];
        if (o.soft) row.soft_ms = group_states_[slot].soft_ms;
        if (o.soft_now) {
            uint64_t until = group_states_[slot].soft_until;
            uint64_t left = until > now_ms_ ? until - now_ms_ : 1;
            row.soft_left_ms = static_cast<uint32_t>(std::min<uint64_t>(left, row.soft_ms));
        }
        if (o.group != nullptr) row.group = o.group->id;
        row.name = name(slot);
        rows.push_back(std::move(row));
    }
    return rows;
}

void ObjectTable::take_back() {
    for (uint32_t slot = 0; slot < used_; ++slot) {
        if (committed(slot)) index_.revive(slot, objects_[slot].generation);
    }
    index_.end_supersede();
}

// The clock is that of the object, so that a group has the age of its member that was used last.
void ObjectTable::adopt_hints(uint32_t slot, const HandedObject& row) {
    Object& o = objects_[slot];
    clock_ = row.last_used;
    if (row.group != Hash128{}) join(slot, row.group);
    if (row.soft_ms == 0) return;
    GroupState& state = group_states_[slot];
    o.soft = true;
    state.soft_ms = row.soft_ms;
    if (row.soft_left_ms == 0) return;
    pin_softly(slot);
    soft_pins_.erase({state.soft_until, slot});
    state.soft_until = now_ms_ + row.soft_left_ms;
    soft_pins_.emplace(state.soft_until, slot);
    o.used = row.used;
}

Status ObjectTable::adopt(const HandedPool& pool, const std::unordered_map<uint32_t, uint32_t>& pins,
                          const HashOf& hash) {
    std::vector<const HandedObject*> rows;
    for (const HandedObject& row : pool.objects) {
        if (row.slot >= index_.slots()) {
            return Error{Code::kInvalidArgument, "the running node has objects beyond node.objects_max = " +
                                                     std::to_string(index_.slots()) +
                                                     "; give the new one at least as many"};
        }
        if (!row.detached || pins.contains(row.slot)) rows.push_back(&row);
    }
    std::ranges::sort(rows, {}, &HandedObject::last_used);
    for (const HandedObject* row : rows) {
        const uint32_t slot = row->slot;
        const Hash128 key = hash(row->space, row->name);
        if (!row->detached && find(row->space, key, row->name) != kNoSlot)
            return Error{Code::kProtocol, "the running node describes two objects of one key"};
        used_ = std::max(used_, slot + 1);
        Object& o = objects_[slot];
        o.generation = row->generation;
        o.last_used = row->last_used;
        o.scrubbed = row->scrubbed;
        o.parent = kNoSlot;
        o.state.move_to(SlotState::kCommitted);
        versions_[slot] = row->version;
        if (auto of_slot = pins.find(slot); of_slot != pins.end()) o.pins = of_slot->second;
        if (row->name.size() > kInlineName) long_names_.emplace(slot, row->name);
        index_.publish(slot, o.generation, row->space, key, row->name, row->extent, row->crc);
        if (in_space_.size() <= row->space) in_space_.resize(row->space + 1);
        ++in_space_[row->space];
        if (o.pins != 0) {
            ++counters_.pinned;
            counters_.pinned_bytes += row->extent.size;
        }
        if (row->detached) {
            index_.retract(slot);
            o.state.move_to(SlotState::kDetached);
            ++counters_.detached;
            continue;
        }
        ++counters_.objects;
        counters_.object_bytes += row->extent.size;
        adopt_hints(slot, *row);
    }
    for (const HandedObject* row : rows) {
        const bool known = row->parent < used_ && row->parent_generation != 0 &&
                           objects_[row->parent].generation == row->parent_generation;
        if (!known) continue;
        Object& o = objects_[row->slot];
        Object& parent = objects_[row->parent];
        o.parent = row->parent;
        o.parent_generation = row->parent_generation;
        ++parent.children;
        if (o.group != nullptr && o.group == parent.group) ++group_states_[row->parent].children_in_group;
    }
    // A member that stands for its group is as old as the group by now.
    auto used = [&](const HandedObject* row) { return objects_[row->slot].last_used; };
    if (!std::ranges::is_sorted(rows, {}, used)) std::ranges::stable_sort(rows, {}, used);
    for (const HandedObject* row : rows) {
        if (committed(row->slot)) settle(row->slot, true);
    }
    for (uint32_t slot = used_; slot-- > 0;) {
        if (objects_[slot].state == SlotState::kFree) free_slots_.push_back(slot);
    }
    clock_ = pool.uses;
    generation_ = pool.generations;
    return success();
}

}  // namespace moonpool
