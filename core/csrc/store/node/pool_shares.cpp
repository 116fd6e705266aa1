// The half of Pool that gives memory to other tenants and gets some from them. A piece that is given back is
// taken out of the allocator and into absent_, and its pages go to the system; a piece that is taken goes the
// other way. So neither leases nor objects know of absent memory: it is as if a lease had it that never ends.
//
// Cost on the loop: the kernel clears what is taken, about 0.2 ms a MiB in pages of 4 KiB; giving back costs
// a third of that. One lease moves what it asked for, a few MiB. A giver without holes of a grain sorts its
// objects for one window each time, O(n log n).
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "store/node/pool.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kSmallGrain = 256u << 10;
constexpr uint64_t kSmallArena = 64u << 20;

}  // namespace

// Whole huge pages, but for small arenas. Of those no page is gathered, so none is given back by halves.
void Pool::set_grain() {
    PoolOptions& o = options_;
    if (!o.shares_memory || o.start_bytes == 0) o.start_bytes = o.arena_bytes;
    if (!o.shares_memory) return;
    grain_bytes_ = o.start_bytes < kSmallArena ? kSmallGrain : kHugePageBytes;
    o.start_bytes = std::max(o.start_bytes / grain_bytes_, uint64_t{1}) * grain_bytes_;
    o.arena_bytes = (std::max(o.arena_bytes, o.start_bytes) + grain_bytes_ - 1) / grain_bytes_ * grain_bytes_;
}

// What is behind the memory of the start, once that is all there.
void Pool::add_absent() {
    if (!options_.shares_memory || allocator_.capacity() == arena_bytes()) return;
    absent_.grow_allocated(allocator_.capacity());
    absent_.grow(arena_bytes() - allocator_.capacity());
    allocator_.grow_allocated(arena_bytes() - allocator_.capacity());
}

// Whether a lease was short of memory, and got what it needs.
bool Pool::get_memory(uint64_t min, uint64_t want) {
    if (!on_short_) return false;
    bool fits = allocator_.largest() >= round_up_to_page(min);
    if (fits && free_bytes() >= std::max(2 * want, capacity() / 16)) return false;
    uint64_t bytes = std::max(fits ? 0 : round_up_to_page(min), want);
    uint64_t got = on_short_(*this, bytes, fits ? 0 : round_up_to_page(min));
    publish_free_bytes();
    return got >= bytes;
}

uint64_t Pool::take_memory(uint64_t bytes, uint64_t piece) {
    loop_waits_ = true;
    MutexLock lock(commit_mutex_);
    end_loop_wait();
    uint64_t taken = 0;
    while (taken < bytes) {
        std::optional<Extent> extent;
        if (taken == 0 && piece > grain_bytes_) extent = absent_.allocate(piece, piece, grain_bytes_);
        if (extent && extent->size > bytes) {
            absent_.free(*extent);
            extent.reset();
        }
        if (!extent) extent = absent_.allocate(grain_bytes_, bytes - taken, grain_bytes_);
        if (!extent) break;
        // The system may have given the memory to another process meanwhile.
        bool may = !may_commit_ || may_commit_(extent->size);
        if (!may || !arena_.commit_range(extent->offset, extent->size)) {
            absent_.free(*extent);
            break;
        }
        allocator_.free(*extent);
        taken += extent->size;
    }
    share_counters_.taken_bytes += taken;
    return taken;
}

// Makes room for whole grains, up to `bytes`. By age, but only as far as there are not enough bytes; once
// there are, and they lie scattered, it takes the window whose turn comes first.
bool Pool::make_grains(uint64_t bytes, uint64_t evict_max) {
    if (table_->counters().pinned != 0) {
        bytes = std::min(bytes, table_->evictable_grains(grain_bytes_) * grain_bytes_);
        if (bytes == 0) return false;
    }
    const uint64_t last = table_->counters().evicted_total + evict_max;
    while (free_bytes() < bytes && table_->counters().evicted_total < last && table_->evict_for_memory()) {
    }
    if (allocator_.largest() >= bytes + grain_bytes_) return true;
    bytes = std::min(bytes, free_bytes() / grain_bytes_ * grain_bytes_);
    // In any window of that size so many whole grains lie; pins may leave but a smaller one.
    for (uint64_t window : {bytes, grain_bytes_}) {
        if (window != 0 && table_->evict_window(window + grain_bytes_ - kPageBytes)) return true;
    }
    return false;
}

uint64_t Pool::give_back(uint64_t bytes, uint64_t evict_max) {
    bytes = (bytes + grain_bytes_ - 1) / grain_bytes_ * grain_bytes_;
    const TableCounters before = table_->counters();
    auto evicted_bytes = [&] { return table_->counters().evicted_bytes_total - before.evicted_bytes_total; };
    uint64_t given = 0;
    while (given < bytes) {
        std::optional<Extent> extent;
        if (allocator_.largest() >= grain_bytes_)
            extent = allocator_.allocate(grain_bytes_, bytes - given, grain_bytes_);
        if (!extent) {
            if (evict_max == 0) break;
            bool made = make_grains(bytes - given, std::exchange(evict_max, 0));
            if (made) extent = allocator_.allocate(grain_bytes_, bytes - given, grain_bytes_);
            if (!extent) break;
        }
        loop_waits_ = true;
        MutexLock lock(commit_mutex_);
        end_loop_wait();
        if (!arena_.give_back(extent->offset, extent->size)) {
            allocator_.free(*extent);
            break;
        }
        absent_.free(*extent);
        given += extent->size;
    }
    share_counters_.given_bytes += given;
    share_counters_.evicted += table_->counters().evicted_total - before.evicted_total;
    share_counters_.evicted_bytes += evicted_bytes();
    publish_free_bytes();
    return given;
}

void Pool::drop_strays() {
    struct stat file {};
    if (reserving() || ::fstat(arena_.fd(), &file) != 0) return;
    constexpr uint64_t kUnit = 512;  // of st_blocks
    if (static_cast<uint64_t>(file.st_blocks) * kUnit <= capacity()) return;
    loop_waits_ = true;
    MutexLock lock(commit_mutex_);
    end_loop_wait();
    absent_.for_each([this](Extent extent) { (void)arena_.give_back(extent.offset, extent.size); });
}

// As collapse_memory(), page by page: one that was given back is not there, and fails. Nothing is published
// as settled, so no card pins any of it.
uint64_t Pool::collapse_shared() {
    if (grain_bytes_ < kHugePageBytes) return 0;
    while (collapsed_ < committed_) {
        while (loop_waits_) loop_waits_.wait(true);
        MutexLock lock(commit_mutex_);
        bool done = arena_.collapse(collapsed_, kHugePageBytes);
        collapsed_ += kHugePageBytes;
        if (!done) continue;
        huge_bytes_ += kHugePageBytes;
        return kHugePageBytes;
    }
    return 0;
}

}  // namespace moonpool
