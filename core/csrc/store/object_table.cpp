#include "store/object_table.hpp"

#include <algorithm>

namespace moonpool {

ObjectTable::ObjectTable(IndexWriter index, ExtentAllocator& allocator, Leases& leases)
    : index_(std::move(index)),
      allocator_(allocator),
      leases_(leases),
      objects_(static_cast<Object*>(std::calloc(index_.slots(), sizeof(Object)))) {}

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
                                        Extent extent, uint32_t crc, uint32_t parent, bool replace) {
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
    if (parent != kNoSlot) {
        o.parent = parent;
        o.parent_generation = objects_[parent].generation;
        ++objects_[parent].children;
        unlist(parent);
    }
    if (object_name.size() > kInlineName) long_names_.emplace(slot, object_name);
    index_.publish(slot, o.generation, space, hash, object_name, extent, crc);
    if (delta_log_ != nullptr) delta_log_->push(hash, Tier::kDram, true);
    if (listener_) listener_(space, hash, object_name, true);
    ++counters_.objects;
    counters_.object_bytes += extent.size;
    list_if_leaf(slot, true);
    if (on_commit_) on_commit_(slot);
    return Commit::kStored;
}

void ObjectTable::touch(uint32_t slot) {
    Object& o = objects_[slot];
    o.last_used = ++clock_;
    if (!o.listed) return;
    unlist(slot);
    list_if_leaf(slot, true);
}

void ObjectTable::pin(uint32_t slot) {
    Object& o = objects_[slot];
    if (o.pins++ == 0) ++counters_.pinned;
    o.last_used = ++clock_;
    unlist(slot);
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
        o.last_used = ++clock_;  // it was in use until now
        list_if_leaf(slot, true);
    }
}

void ObjectTable::hold(uint32_t slot) { ++objects_[slot].holds; }

void ObjectTable::let_go(uint32_t slot, uint64_t generation) {
    Object& o = objects_[slot];
    if (o.generation != generation || o.holds == 0 || --o.holds != 0) return;
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
    if (--p.children == 0) list_if_leaf(parent, false);
}

bool ObjectTable::evict_one() { return evict(first_evictable(false)); }

bool ObjectTable::evict_for_memory() { return evict(first_evictable(true)); }

uint32_t ObjectTable::first_evictable(bool for_memory) const {
    constexpr int kPassMax = 256;
    uint32_t victim = oldest_;
    for (int i = 0; i < kPassMax && victim != kNoSlot; ++i) {
        bool stays = objects_[victim].holds != 0 || (for_memory && leases_.inside_open(extent(victim)));
        if (!stays) break;
        victim = objects_[victim].newer;
    }
    return victim != kNoSlot && objects_[victim].holds != 0 ? kNoSlot : victim;
}

bool ObjectTable::evict(uint32_t victim) {
    if (victim == kNoSlot) return false;
    ++counters_.evicted_total;
    counters_.evicted_bytes_total += extent(victim).size;
    if (!objects_[victim].saved) ++counters_.evicted_unsaved_total;
    remove(victim);
    return true;
}

// Free extents and objects without pins, by offset, in runs that touch each other. The window slides over a
// run; its price is the bytes of objects in it.
bool ObjectTable::evict_window(uint64_t bytes) {
    struct Piece {
        Extent extent;
        uint32_t slot;  // kNoSlot: free already
    };
    std::vector<Piece> pieces;
    allocator_.for_each([&](Extent e) { pieces.push_back({e, kNoSlot}); });
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state != State::kComplete || o.pins != 0 || o.holds != 0 || extent(slot).size == 0) continue;
        if (!leases_.inside_open(extent(slot))) pieces.push_back({extent(slot), slot});
    }
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.extent.offset < b.extent.offset; });

    auto price = [](const Piece& p) { return p.slot == kNoSlot ? 0 : p.extent.size; };
    size_t best_begin = 0, best_end = 0;
    uint64_t best_price = UINT64_MAX;
    uint64_t window_price = 0;
    for (size_t begin = 0, end = 0; end < pieces.size();) {
        if (end > begin && pieces[end].extent.offset != pieces[end - 1].extent.end()) {
            begin = end;
            window_price = 0;
        }
        window_price += price(pieces[end++]);
        while (pieces[end - 1].extent.end() - pieces[begin].extent.offset >= bytes) {
            if (window_price < best_price) {
                best_price = window_price;
                best_begin = begin;
                best_end = end;
            }
            window_price -= price(pieces[begin++]);
            if (begin == end) break;
        }
    }
    if (best_price == UINT64_MAX) return false;
    for (size_t i = best_begin; i < best_end; ++i) {
        evict(pieces[i].slot);
    }
    return true;
}

void ObjectTable::list_if_leaf(uint32_t slot, bool newest) {
    Object& o = objects_[slot];
    if (o.listed || o.state != State::kComplete || o.pins != 0 || o.children != 0) return;
    // Where it stands by age. A parent that became a leaf is about as old as the child that just left the old
    // end; the bound keeps a rare long walk from stalling the loop at the price of a slightly wrong order.
    constexpr int kWalkMax = 256;
    uint32_t newer = kNoSlot;
    if (!newest) {
        newer = oldest_;
        for (int i = 0; i < kWalkMax && newer != kNoSlot && objects_[newer].last_used < o.last_used; ++i) {
            newer = objects_[newer].newer;
        }
    }
    uint32_t older = newer == kNoSlot ? newest_ : objects_[newer].older;
    o.older = older;
    o.newer = newer;
    (older == kNoSlot ? oldest_ : objects_[older].newer) = slot;
    (newer == kNoSlot ? newest_ : objects_[newer].older) = slot;
    o.listed = true;
}

void ObjectTable::unlist(uint32_t slot) {
    Object& o = objects_[slot];
    if (!o.listed) return;
    (o.older == kNoSlot ? oldest_ : objects_[o.older].newer) = o.newer;
    (o.newer == kNoSlot ? newest_ : objects_[o.newer].older) = o.older;
    o.listed = false;
}

bool ObjectTable::check_integrity() const {
    std::vector<uint32_t> children(used_, 0);
    std::vector<Extent> extents;
    uint64_t complete_count = 0, bytes = 0, saved = 0, detached = 0, pinned = 0, listed = 0;
    for (uint32_t slot = 0; slot < used_; ++slot) {
        const Object& o = objects_[slot];
        if (o.state == State::kFree) continue;
        if (extent(slot).size != 0) extents.push_back(extent(slot));
        if (o.parent != kNoSlot && objects_[o.parent].generation == o.parent_generation) ++children[o.parent];
        if (o.pins != 0) ++pinned;
        if (o.state == State::kDetached) {
            ++detached;
            if ((o.pins == 0 && o.holds == 0) || o.listed || o.saved) return false;
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
        bool leaf = o.state == State::kComplete && o.pins == 0 && o.children == 0;
        if (o.listed != leaf) return false;
    }
    uint32_t previous = kNoSlot;
    for (uint32_t slot = oldest_; slot != kNoSlot; slot = objects_[slot].newer) {
        if (!objects_[slot].listed || objects_[slot].older != previous || ++listed > used_) return false;
        previous = slot;
    }
    if (previous != newest_) return false;
    std::sort(extents.begin(), extents.end(), [](Extent a, Extent b) { return a.offset < b.offset; });
    for (size_t i = 1; i < extents.size(); ++i) {
        if (extents[i].offset < extents[i - 1].end()) return false;
    }
    return complete_count == counters_.objects && bytes == counters_.object_bytes &&
           saved == counters_.saved_bytes && detached == counters_.detached && pinned == counters_.pinned &&
           leases_.check_integrity();
}

}  // namespace moonpool
