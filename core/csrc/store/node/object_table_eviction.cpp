// The half of ObjectTable that chooses what to evict when there is no room: the lists by age, leaves of
// chains first, groups as a whole, and windows of memory in one piece.
//
// Order of a search: the ordinary list from its old end, then the list of soft-pinned objects, then members
// that only their group keeps. Each search looks at kWalkMax objects at most; that it then finds nothing is
// an answer the callers can bear (a put is refused), a stalled loop is not.
#include <algorithm>
#include <deque>

#include "store/node/object_table.hpp"

namespace moonpool {

namespace {

constexpr int kWalkMax = 256;  // objects looked at in a list: a long walk would stall the loop

}  // namespace

bool ObjectTable::evict_one() { return evict(first_evictable(false)); }

bool ObjectTable::evict_for_memory() { return evict(first_evictable(true)); }

uint32_t ObjectTable::first_evictable(bool for_memory) const {
    for (const Order& order : orders_) {
        if (uint32_t victim = first_of(order, for_memory); victim != kNoSlot) return victim;
    }
    return first_member(for_memory);
}

uint32_t ObjectTable::first_of(const Order& order, bool for_memory) const {
    auto out_of_order = order.out_of_order.begin();
    uint32_t in_list = order.oldest;
    for (int i = 0;; ++i) {
        // Two sequences that are each sorted by age, the list and the tree, are walked as one.
        bool from_out_of_order = out_of_order != order.out_of_order.end() &&
                                 (in_list == kNoSlot || out_of_order->first < objects_[in_list].last_used);
        uint32_t victim = from_out_of_order ? out_of_order->second : in_list;
        if (victim == kNoSlot) return kNoSlot;
        bool passed = for_memory && i < kWalkMax && !frees_memory(victim);
        if (!all_retained(victim) && !passed) return victim;
        if (i == kWalkMax) return kNoSlot;
        if (from_out_of_order) {
            ++out_of_order;
        } else {
            in_list = objects_[in_list].newer;
        }
    }
}

// Whether something comes free when it is evicted: what lies in an open lease does so only when that ends.
// But one that stands for its group takes the others along, and its parents can go when it has gone: the end
// of a chain in the slab of an idle writer must not keep all of the chain.
bool ObjectTable::frees_memory(uint32_t slot) const {
    auto inside = [&](uint32_t each) { return leases_.inside_open(extent(each)); };
    for (int i = 0; i < kWalkMax && slot != kNoSlot; ++i, slot = objects_[slot].parent) {
        if (!inside(slot) || !std::ranges::all_of(group_members(slot), inside)) return true;
    }
    return false;
}

// The first that its group keeps, for when there is nothing else.
uint32_t ObjectTable::first_member(bool for_memory) const {
    uint32_t victim = oldest_member_;
    for (int i = 0; i < kWalkMax && victim != kNoSlot; ++i) {
        bool passed = for_memory && leases_.inside_open(extent(victim));
        if (objects_[victim].retains == 0 && !passed) return victim;
        victim = group_states_[victim].newer;
    }
    return kNoSlot;
}

// With its group; if that cannot go as a whole, then with what of it can, children first. A member that is
// written to an SSD goes too: its memory comes back when that is done.
bool ObjectTable::evict(uint32_t victim) {
    if (victim == kNoSlot) return false;
    const Group* group = objects_[victim].group;
    bool whole = group != nullptr && group->blocked == 0;
    std::vector<uint32_t> others = group_members(victim);
    if (!whole) std::ranges::sort(others, std::greater{}, [&](uint32_t slot) { return generation(slot); });
    evict_alone(victim);
    for (uint32_t slot : others) {
        if (whole || may_go_alone(slot)) evict_alone(slot);
    }
    return true;
}

void ObjectTable::evict_alone(uint32_t victim) {
    ++counters_.evicted_total;
    counters_.evicted_bytes_total += extent(victim).size;
    if (!objects_[victim].saved) ++counters_.evicted_unsaved_total;
    if (objects_[victim].retains != 0 && on_evict_unwritten_) {
        const IndexEntry& entry = index_.entry(victim);
        on_evict_unwritten_(Hash128{entry.hash_low, entry.hash_high});
    }
    remove(victim);
}

// When an object's turn comes, a parent's after those of its children: a chain loses its end first. What is
// soft-pinned, and parts of a group of which another must stay, come after all others, and what a pinned
// object hangs on comes last.
std::vector<ObjectTable::VictimRank> ObjectTable::victim_ranks() const {
    std::vector<VictimRank> ranks(used_);
    std::vector<uint32_t> untold(used_);  // children
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == SlotState::kFree) continue;
        bool split = o.group != nullptr && o.group->blocked != 0;
        ranks[slot].rank = o.pins != 0 ? 2 : order_of(slot) != 0 || split;
        ranks[slot].used = objects_[standing(slot)].last_used;
        untold[slot] = o.children;
    }
    for (uint32_t leaf = 0; leaf < used_; ++leaf) {
        if (objects_[leaf].state == SlotState::kFree || objects_[leaf].children != 0) continue;
        for (uint32_t slot = leaf, parent; (parent = known_parent(slot)) != kNoSlot; slot = parent) {
            VictimRank after = ranks[slot];
            ++after.below;
            ranks[parent] = std::max(ranks[parent], after);
            if (--untold[parent] != 0) break;  // the last child goes on from here
        }
    }
    for (uint32_t slot = 0; slot < used_; ++slot) {
        if (objects_[slot].group == nullptr) continue;
        ranks[standing(slot)] = std::max(ranks[standing(slot)], ranks[slot]);
    }
    return ranks;
}

// Free extents and objects without pins, by offset. A window slides over runs that touch each other; the best
// is the one whose last turn comes first, and of free ones the first: by bytes alone each large object would
// take the place of the one before it.
bool ObjectTable::evict_window(uint64_t bytes) {
    std::vector<Piece> pieces;
    allocator_.for_each([&](Extent e) { pieces.push_back({e, kNoSlot}); });
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state != SlotState::kCommitted || o.pins != 0 || o.retains != 0 || extent(slot).size == 0)
            continue;
        if (!leases_.inside_open(extent(slot))) pieces.push_back({extent(slot), slot});
    }
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.extent.offset < b.extent.offset; });
    std::vector<VictimRank> all = victim_ranks();
    auto price = [](const Piece& p) { return p.slot == kNoSlot ? 0 : p.extent.size; };
    auto turn = [&](size_t i) {
        return pieces[i].slot == kNoSlot ? VictimRank{} : all[standing(pieces[i].slot)];
    };
    size_t best_begin = 0, best_end = 0;
    std::pair<VictimRank, uint64_t> best{VictimRank{.rank = UINT8_MAX}, 0};
    uint64_t window_price = 0;
    std::deque<size_t> last;  // of the window, the ranks falling: that of the first is the window's
    for (size_t begin = 0, end = 0; end < pieces.size();) {
        if (end > begin && pieces[end].extent.offset != pieces[end - 1].extent.end()) {
            begin = end;
            window_price = 0;
            last.clear();
        }
        while (!last.empty() && turn(last.back()) <= turn(end)) last.pop_back();
        last.push_back(end);
        window_price += price(pieces[end++]);
        while (pieces[end - 1].extent.end() - pieces[begin].extent.offset >= bytes) {
            if (std::pair cost{turn(last.front()), window_price}; cost < best) {
                best = cost;
                best_begin = begin;
                best_end = end;
            }
            if (last.front() == begin) last.pop_front();
            window_price -= price(pieces[begin++]);
            if (begin == end) break;
        }
    }
    if (best_end == 0) return false;
    for (size_t i = best_begin; i < best_end; ++i) {
        uint32_t slot = pieces[i].slot;
        if (slot != kNoSlot && committed(slot)) evict(slot);  // else it went with its group
    }
    return true;
}

uint64_t ObjectTable::evictable_grains(uint64_t grain) const {
    std::vector<uint64_t> bytes;  // of each grain, what is free or may go
    auto add = [&](Extent e) {
        for (uint64_t at = e.offset; at < e.end();) {
            uint64_t next = std::min(e.end(), (at / grain + 1) * grain);
            if (bytes.size() <= at / grain) bytes.resize(at / grain + 1);
            bytes[at / grain] += next - at;
            at = next;
        }
    };
    allocator_.for_each(add);
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == SlotState::kCommitted && o.pins == 0 && o.retains == 0 &&
            !leases_.inside_open(extent(slot)))
            add(extent(slot));
    }
    return static_cast<uint64_t>(std::ranges::count(bytes, grain));
}

// Puts an object, or the one that stands for its group, into the eviction list that it belongs to, or out of
// it.
void ObjectTable::settle(uint32_t slot, bool newest) {
    Object& o = objects_[slot];
    bool goes = may_go(slot);
    uint32_t at = slot;
    if (o.group != nullptr) {
        Group& group = *o.group;
        if (group_states_[slot].listed != may_go_alone(slot)) {
            group_states_[slot].listed ? unlist_member(slot) : list_member(slot, newest);
        }
        if (o.blocks == goes) goes ? --group.blocked : ++group.blocked;
        o.blocks = !goes;
        at = group.first;
        goes = group.blocked == 0;
    }
    if (objects_[at].listed && (!goes || objects_[at].order != order_of(at))) unlist(at);
    if (goes && !objects_[at].listed) list(at, order_of(at), newest);
}

void ObjectTable::list(uint32_t slot, uint8_t which, bool at_newest) {
    Object& o = objects_[slot];
    Order& order = orders_[which];
    o.listed = true;
    o.order = which;
    // Where it stands by age. A parent that became a leaf is about as old as the child that just left the old
    // end; what was soft-pinned until now may belong anywhere.
    at_newest |= order.newest != kNoSlot && objects_[order.newest].last_used < o.last_used;
    uint32_t newer = at_newest ? kNoSlot : order.oldest;
    for (int i = 0; newer != kNoSlot && objects_[newer].last_used < o.last_used; ++i) {
        newer = objects_[newer].newer;
        if (i < kWalkMax) continue;
        o.out_of_order = true;
        order.out_of_order.emplace(o.last_used, slot);
        return;
    }
    uint32_t older = newer == kNoSlot ? order.newest : objects_[newer].older;
    o.older = older;
    o.newer = newer;
    (older == kNoSlot ? order.oldest : objects_[older].newer) = slot;
    (newer == kNoSlot ? order.newest : objects_[newer].older) = slot;
}

void ObjectTable::unlist(uint32_t slot) {
    Object& o = objects_[slot];
    if (!o.listed) return;
    o.listed = false;
    Order& order = orders_[o.order];
    if (o.out_of_order) {
        order.out_of_order.erase({o.last_used, slot});
        o.out_of_order = false;
        return;
    }
    (o.older == kNoSlot ? order.oldest : objects_[o.older].newer) = o.newer;
    (o.newer == kNoSlot ? order.newest : objects_[o.newer].older) = o.older;
}

// At one of the ends: about by age, which is enough for what goes last of all.
void ObjectTable::list_member(uint32_t slot, bool at_newest) {
    GroupState& m = group_states_[slot];
    m.listed = true;
    m.older = at_newest ? newest_member_ : kNoSlot;
    m.newer = at_newest ? kNoSlot : oldest_member_;
    (m.older == kNoSlot ? oldest_member_ : group_states_[m.older].newer) = slot;
    (m.newer == kNoSlot ? newest_member_ : group_states_[m.newer].older) = slot;
}

void ObjectTable::unlist_member(uint32_t slot) {
    GroupState& m = group_states_[slot];
    if (!m.listed) return;
    m.listed = false;
    (m.older == kNoSlot ? oldest_member_ : group_states_[m.older].newer) = m.newer;
    (m.newer == kNoSlot ? newest_member_ : group_states_[m.newer].older) = m.older;
}

}  // namespace moonpool
