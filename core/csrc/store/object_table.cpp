#include "store/object_table.hpp"

#include <algorithm>
#include <deque>
#include <iterator>

namespace moonpool {

namespace {

constexpr int kWalkMax = 256;  // objects looked at in a list: a long walk would stall the loop

}  // namespace

ObjectTable::ObjectTable(IndexWriter index, ExtentAllocator& allocator, Leases& leases)
    : index_(std::move(index)),
      allocator_(allocator),
      leases_(leases),
      objects_(static_cast<Object*>(std::calloc(index_.slots(), sizeof(Object)))),
      marks_(static_cast<Marks*>(std::calloc(index_.slots(), sizeof(Marks)))) {}

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
                                        const Keep& keep) {
    uint32_t old = find(space, hash, object_name);
    if (old != kNoSlot && !replace) return Commit::kExists;
    // Room first, so that a refusal leaves the old generation where it is.
    bool full = free_slots_.empty() && used_ == index_.slots();
    bool old_makes_room = old != kNoSlot && objects_[old].pins == 0 && objects_[old].holds == 0;
    if (full && !old_makes_room && !evict_one()) return Commit::kNoSlot;
    if (replace && on_replace_) on_replace_(hash);
    if (old != kNoSlot) retire(old, false);
    if (parent != kNoSlot && !complete(parent)) parent = kNoSlot;  // it was evicted or replaced just now
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
    o.last_used = ++clock_;
    o.state = State::kComplete;
    o.parent = kNoSlot;
    bool marked = keep.group != Hash128{} || keep.soft_ms != 0;
    if (marked) marks_[slot] = Marks{};
    if (keep.group != Hash128{}) join(slot, keep.group);
    if (keep.soft_ms != 0) {
        o.soft = true;
        marks_[slot].soft_ms = keep.soft_ms;
        pin_softly(slot);
    }
    if (parent != kNoSlot) {
        o.parent = parent;
        o.parent_generation = objects_[parent].generation;
        ++objects_[parent].children;
        if (o.group != nullptr && o.group == objects_[parent].group) ++marks_[parent].children_in_group;
        settle(parent, false);
    }
    if (object_name.size() > kInlineName) long_names_.emplace(slot, object_name);
    index_.publish(slot, o.generation, space, hash, object_name, extent, crc);
    if (delta_log_ != nullptr) delta_log_->push(hash, Tier::kDram, true);
    if (listener_) listener_(space, hash, object_name, true);
    ++counters_.objects;
    counters_.object_bytes += extent.size;
    settle(slot, true);
    if (on_commit_) on_commit_(slot);
    return Commit::kStored;
}

// A use of one member is a use of its group. Whoever calls it settles the object.
void ObjectTable::use(uint32_t slot) {
    Object& o = objects_[slot];
    unlist(standing(slot));
    if (o.group != nullptr) unlist_member(slot);
    o.last_used = ++clock_;
    o.used = true;
    if (o.soft && !o.soft_now && o.state == State::kComplete) pin_softly(slot);
    objects_[standing(slot)].last_used = clock_;
}

void ObjectTable::touch(uint32_t slot) {
    use(slot);
    settle(slot, true);
}

void ObjectTable::pin(uint32_t slot) {
    if (objects_[slot].pins++ == 0) ++counters_.pinned;
    use(slot);
    settle(slot, true);
}

void ObjectTable::unpin(uint32_t slot, uint64_t generation) {
    Object& o = objects_[slot];
    if (o.generation != generation || o.pins == 0) return;
    if (--o.pins != 0) return;
    --counters_.pinned;
    if (o.state == State::kDetached) {
        if (o.holds != 0) return;
        --counters_.detached;
        release(slot);
    } else {
        use(slot);  // it was in use until now
        settle(slot, true);
    }
}

void ObjectTable::hold(uint32_t slot) {
    Object& o = objects_[slot];
    if (o.holds++ == 0 && o.group != nullptr) ++o.group->held;
}

void ObjectTable::let_go(uint32_t slot, uint64_t generation) {
    Object& o = objects_[slot];
    if (o.generation != generation || o.holds == 0 || --o.holds != 0) return;
    if (o.group != nullptr) --o.group->held;
    if (o.state != State::kDetached || o.pins != 0) return;
    --counters_.detached;
    release(slot);
}

std::string_view ObjectTable::parent_name(uint32_t slot) const {
    const Object& o = objects_[slot];
    bool known = o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation;
    return known ? name(o.parent) : std::string_view();
}

void ObjectTable::set_saved(uint32_t slot, bool saved) {
    Object& o = objects_[slot];
    if (o.saved == saved || o.state != State::kComplete) return;
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
    index_.retract(slot);
    --counters_.objects;
    counters_.object_bytes -= extent(slot).size;
    if (o.pins != 0 || o.holds != 0) {
        o.state = State::kDetached;
        ++counters_.detached;
    } else {
        release(slot);
    }
}

void ObjectTable::release(uint32_t slot) {
    Object& o = objects_[slot];
    forget_parent(slot);
    leases_.free(extent(slot));
    long_names_.erase(slot);
    o.state = State::kFree;
    o.generation = 0;
    free_slots_.push_back(slot);
}

void ObjectTable::forget_parent(uint32_t slot) {
    Object& o = objects_[slot];
    uint32_t parent = o.parent;
    o.parent = kNoSlot;
    if (parent == kNoSlot) return;
    Object& p = objects_[parent];
    if (p.generation != o.parent_generation) return;
    --p.children;
    settle(parent, false);
}

bool ObjectTable::evict_one() { return evict(first_evictable(false)); }

bool ObjectTable::evict_for_memory() { return evict(first_evictable(true)); }

uint32_t ObjectTable::first_evictable(bool for_memory) const {
    for (const Order& order : orders_) {
        if (uint32_t victim = first_of(order, for_memory); victim != kNoSlot) return victim;
    }
    return first_member(for_memory);
}

uint32_t ObjectTable::first_of(const Order& order, bool for_memory) const {
    auto apart = order.apart.begin();
    uint32_t in_list = order.oldest;
    for (int i = 0;; ++i) {
        bool from_apart =
            apart != order.apart.end() && (in_list == kNoSlot || apart->first < objects_[in_list].last_used);
        uint32_t victim = from_apart ? apart->second : in_list;
        if (victim == kNoSlot) return kNoSlot;
        bool passed = for_memory && i < kWalkMax && !frees_memory(victim);
        if (!held_back(victim) && !passed) return victim;
        if (i == kWalkMax) return kNoSlot;
        if (from_apart) {
            ++apart;
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
        if (!inside(slot) || !std::ranges::all_of(mates(slot), inside)) return true;
    }
    return false;
}

// The first that its group keeps, for when there is nothing else.
uint32_t ObjectTable::first_member(bool for_memory) const {
    uint32_t victim = oldest_member_;
    for (int i = 0; i < kWalkMax && victim != kNoSlot; ++i) {
        bool passed = for_memory && leases_.inside_open(extent(victim));
        if (objects_[victim].holds == 0 && !passed) return victim;
        victim = marks_[victim].newer;
    }
    return kNoSlot;
}

// With its group; if that cannot go as a whole, then with what of it can, children first. A member that is
// written to an SSD goes too: its memory comes back when that is done.
bool ObjectTable::evict(uint32_t victim) {
    if (victim == kNoSlot) return false;
    const Group* group = objects_[victim].group;
    bool whole = group != nullptr && group->blocked == 0;
    std::vector<uint32_t> others = mates(victim);
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
    remove(victim);
}

// Free extents and objects without pins, by offset. What is soft-pinned, and parts of a group of which
// another must stay, are taken where nothing else makes that room.
bool ObjectTable::evict_window(uint64_t bytes) {
    std::vector<Piece> pieces;
    allocator_.for_each([&](Extent e) { pieces.push_back({e, kNoSlot, false}); });
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state != State::kComplete || o.pins != 0 || o.holds != 0 || extent(slot).size == 0) continue;
        if (leases_.inside_open(extent(slot))) continue;
        bool whole = o.group == nullptr || o.group->blocked == 0;
        pieces.push_back({extent(slot), slot, order_of(slot) != 0 || !whole});
    }
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.extent.offset < b.extent.offset; });
    std::vector<Piece> others;
    std::ranges::copy_if(pieces, std::back_inserter(others), [](const Piece& p) { return !p.spared; });
    if (evict_window(others, bytes)) return true;
    return others.size() != pieces.size() && evict_window(pieces, bytes);
}

// A window slides over runs that touch each other; the best is the one whose last use is the longest ago, and
// of free ones the first: by bytes alone each large object would take the place of the one before it.
bool ObjectTable::evict_window(std::span<const Piece> pieces, uint64_t bytes) {
    auto price = [](const Piece& p) { return p.slot == kNoSlot ? 0 : p.extent.size; };
    auto used = [&](size_t i) {
        return pieces[i].slot == kNoSlot ? 0 : objects_[standing(pieces[i].slot)].last_used;
    };
    size_t best_begin = 0, best_end = 0;
    std::pair<uint64_t, uint64_t> best{UINT64_MAX, UINT64_MAX};
    uint64_t window_price = 0;
    std::deque<size_t> youngest;  // the window's, the last use falling: that of the first is the window's
    for (size_t begin = 0, end = 0; end < pieces.size();) {
        if (end > begin && pieces[end].extent.offset != pieces[end - 1].extent.end()) {
            begin = end;
            window_price = 0;
            youngest.clear();
        }
        while (!youngest.empty() && used(youngest.back()) <= used(end)) youngest.pop_back();
        youngest.push_back(end);
        window_price += price(pieces[end++]);
        while (pieces[end - 1].extent.end() - pieces[begin].extent.offset >= bytes) {
            if (std::pair cost{used(youngest.front()), window_price}; cost < best) {
                best = cost;
                best_begin = begin;
                best_end = end;
            }
            if (youngest.front() == begin) youngest.pop_front();
            window_price -= price(pieces[begin++]);
            if (begin == end) break;
        }
    }
    if (best_end == 0) return false;
    for (size_t i = best_begin; i < best_end; ++i) {
        uint32_t slot = pieces[i].slot;
        if (slot != kNoSlot && complete(slot)) evict(slot);  // else it went with its group
    }
    return true;
}

// Puts an object, or the one that stands for its group, into the eviction list that it belongs to, or out of
// it.
void ObjectTable::settle(uint32_t slot, bool newest) {
    Object& o = objects_[slot];
    bool goes = may_go(slot);
    uint32_t at = slot;
    if (o.group != nullptr) {
        Group& group = *o.group;
        if (marks_[slot].listed != may_go_alone(slot)) {
            marks_[slot].listed ? unlist_member(slot) : list_member(slot, newest);
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
        o.apart = true;
        order.apart.emplace(o.last_used, slot);
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
    if (o.apart) {
        order.apart.erase({o.last_used, slot});
        o.apart = false;
        return;
    }
    (o.older == kNoSlot ? order.oldest : objects_[o.older].newer) = o.newer;
    (o.newer == kNoSlot ? order.newest : objects_[o.newer].older) = o.older;
}

// At one of the ends: about by age, which is enough for what goes last of all.
void ObjectTable::list_member(uint32_t slot, bool at_newest) {
    Marks& m = marks_[slot];
    m.listed = true;
    m.older = at_newest ? newest_member_ : kNoSlot;
    m.newer = at_newest ? kNoSlot : oldest_member_;
    (m.older == kNoSlot ? oldest_member_ : marks_[m.older].newer) = slot;
    (m.newer == kNoSlot ? newest_member_ : marks_[m.newer].older) = slot;
}

void ObjectTable::unlist_member(uint32_t slot) {
    Marks& m = marks_[slot];
    if (!m.listed) return;
    m.listed = false;
    (m.older == kNoSlot ? oldest_member_ : marks_[m.older].newer) = m.newer;
    (m.newer == kNoSlot ? newest_member_ : marks_[m.newer].older) = m.older;
}

// ---- groups

void ObjectTable::join(uint32_t slot, const Hash128& id) {
    Group& group = groups_[id];
    if (group.members == kGroupMembersMax) return;
    Object& o = objects_[slot];
    if (group.members++ == 0) {
        group.id = id;
        group.first = marks_[slot].after = marks_[slot].before = slot;
    } else {
        Marks& first = marks_[group.first];
        marks_[slot].after = group.first;
        marks_[slot].before = first.before;
        marks_[first.before].after = slot;
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
    if (o.holds != 0) --group->held;
    o.blocks = false;
    o.group = nullptr;
    uint32_t parent = o.parent;
    bool known = parent != kNoSlot && objects_[parent].generation == o.parent_generation;
    if (known && objects_[parent].group == group) --marks_[parent].children_in_group;
    if (--group->members == 0) {
        groups_.erase(group->id);
        return;
    }
    const Marks& place = marks_[slot];
    marks_[place.before].after = place.after;
    marks_[place.after].before = place.before;
    if (group->first == slot) {
        group->first = place.after;
        Object& first = objects_[group->first];
        first.last_used = std::max(first.last_used, o.last_used);
    }
    settle(known && objects_[parent].group == group ? parent : group->first, false);
}

std::vector<uint32_t> ObjectTable::mates(uint32_t slot) const {
    std::vector<uint32_t> others;
    if (objects_[slot].group == nullptr) return others;
    for (uint32_t at = marks_[slot].after; at != slot; at = marks_[at].after) others.push_back(at);
    return others;
}

// ---- soft pins

void ObjectTable::pin_softly(uint32_t slot) {
    Object& o = objects_[slot];
    Marks& marks = marks_[slot];
    marks.soft_until = now_ms_ + marks.soft_ms;
    o.soft_now = true;
    o.used = false;
    soft_pins_.emplace(marks.soft_until, slot);
    if (o.group != nullptr) ++o.group->soft;
}

void ObjectTable::unpin_softly(uint32_t slot) {
    Object& o = objects_[slot];
    if (!o.soft_now) return;
    soft_pins_.erase({marks_[slot].soft_until, slot});
    o.soft_now = false;
    if (o.group != nullptr) --o.group->soft;
}

void ObjectTable::on_time(uint64_t now_ms) {
    constexpr int kEndsMax = 4096;  // in one go; the rest with the next tick
    now_ms_ = now_ms;
    for (int i = 0; i < kEndsMax && !soft_pins_.empty() && soft_pins_.begin()->first <= now_ms; ++i) {
        uint32_t slot = soft_pins_.begin()->second;
        bool used = objects_[slot].used;
        unpin_softly(slot);
        if (used) pin_softly(slot);
        settle(slot, false);
    }
}

bool ObjectTable::check_integrity() const {
    std::vector<uint32_t> children(used_, 0), children_in_group(used_, 0);
    std::unordered_map<const Group*, Group> groups;
    uint64_t soft = 0;
    std::vector<Extent> extents;
    uint64_t complete_count = 0, bytes = 0, saved = 0, detached = 0, pinned = 0, listed = 0, alone = 0;
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == State::kFree) continue;
        if (extent(slot).size != 0) extents.push_back(extent(slot));
        if (o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation) {
            ++children[o.parent];
            if (o.group != nullptr && o.group == objects_[o.parent].group) ++children_in_group[o.parent];
        }
        if (o.soft_now) {
            ++soft;
            if (!soft_pins_.contains({marks_[slot].soft_until, slot})) return false;
        }
        if (o.pins != 0) ++pinned;
        if (o.state == State::kDetached) {
            ++detached;
            if ((o.pins == 0 && o.holds == 0) || o.listed || o.saved) return false;
            if (o.group != nullptr || o.soft_now) return false;
            continue;
        }
        ++complete_count;
        bytes += extent(slot).size;
        if (o.saved) saved += extent(slot).size;
        const IndexEntry& e = index_.entry(slot);
        if (find(e.space, Hash128{e.hash_low, e.hash_high}, name(slot)) != slot) return false;
        if (e.seq.load() != 2 * o.generation) return false;
    }
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == State::kFree) continue;
        if (o.children != children[slot]) return false;
        if (o.group != nullptr && marks_[slot].children_in_group != children_in_group[slot]) return false;
        bool goes = may_go(slot);
        if (o.group == nullptr) {
            if (o.listed != goes) return false;
            continue;
        }
        if (o.blocks == goes || marks_[marks_[slot].after].before != slot ||
            objects_[marks_[slot].after].group != o.group) {
            return false;
        }
        if (marks_[slot].listed != may_go_alone(slot)) return false;
        alone += marks_[slot].listed;
        Group& books = groups[o.group];
        ++books.members;
        books.blocked += o.blocks;
        books.held += o.holds != 0;
        books.soft += o.soft_now;
        if (o.listed != (o.group->first == slot && o.group->blocked == 0)) return false;
    }
    for (const auto& [group, books] : groups) {
        auto it = groups_.find(group->id);
        if (it == groups_.end() || &it->second != group || group->members > kGroupMembersMax) return false;
        if (books.members != group->members || books.blocked != group->blocked) return false;
        if (books.held != group->held || books.soft != group->soft) return false;
        if (mates(group->first).size() + 1 != group->members) return false;
    }
    if (groups.size() != groups_.size() || soft != soft_pins_.size()) return false;
    uint32_t before = kNoSlot;
    for (uint32_t slot = oldest_member_; slot != kNoSlot; slot = marks_[slot].newer) {
        if (!marks_[slot].listed || marks_[slot].older != before || alone-- == 0) return false;
        before = slot;
    }
    if (before != newest_member_ || alone != 0) return false;
    for (uint8_t which = 0; which < orders_.size(); ++which) {
        for (auto [used, slot] : orders_[which].apart) {
            const Object& o = objects_[slot];
            if (!o.listed || !o.apart || o.order != which || o.order != order_of(slot)) return false;
            if (o.last_used != used || ++listed > used_) return false;
        }
        uint32_t previous = kNoSlot;
        for (uint32_t slot = orders_[which].oldest; slot != kNoSlot; slot = objects_[slot].newer) {
            const Object& o = objects_[slot];
            if (!o.listed || o.apart || o.order != which || o.order != order_of(slot)) return false;
            if (o.older != previous || ++listed > used_) return false;
            previous = slot;
        }
        if (previous != orders_[which].newest) return false;
    }
    std::sort(extents.begin(), extents.end(), [](Extent a, Extent b) { return a.offset < b.offset; });
    for (size_t i = 1; i < extents.size(); ++i) {
        if (extents[i].offset < extents[i - 1].end()) return false;
    }
    return complete_count == counters_.objects && bytes == counters_.object_bytes &&
           saved == counters_.saved_bytes && detached == counters_.detached && pinned == counters_.pinned &&
           leases_.check_integrity();
}

}  // namespace moonpool
