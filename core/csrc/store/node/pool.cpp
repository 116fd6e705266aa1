#include "store/node/pool.hpp"

#include <fcntl.h>

#include <algorithm>

#include "base/crc32c.hpp"

namespace moonpool {

Result<std::unique_ptr<Pool>> Pool::create(const PoolOptions& options, const Incarnation& incarnation) {
    std::unique_ptr<Pool> pool(new Pool());
    if (Status status = pool->set_sizes(options); !status) return status.error();
    const PoolOptions& o = pool->options_;
    Result<Arena> arena = Arena::create("moonpool-arena-" + o.tenant.substr(0, 64), o.arena_bytes);
    if (!arena) return arena.error();
    pool->arena_ = std::move(*arena);
    if (Status status = pool->make_table(incarnation); !status) return status.error();
    return pool;
}

Status Pool::set_sizes(const PoolOptions& options) {
    options_ = options;
    PoolOptions& o = options_;
    o.arena_bytes = round_up_to_page(o.arena_bytes);
    set_grain();
    if (o.arena_bytes < (1u << 20)) {
        return Error{Code::kInvalidArgument,
                     "the arena of tenant " + o.tenant + " is under 1 MiB; give it more memory"};
    }
    if (o.objects_max == 0) {
        uint64_t most = std::max<uint64_t>(8u << 20, o.arena_bytes / (64u << 10));
        most = std::min<uint64_t>(most, 1u << 30);
        o.objects_max = static_cast<uint32_t>(std::clamp<uint64_t>(o.arena_bytes / 1024, 4096, most));
    }
    if (o.slab_bytes == 0) {
        o.slab_bytes = std::clamp<uint64_t>(o.arena_bytes / 128, kSlabMin, kSlabMax);
    }
    o.slab_bytes = round_up_to_page(o.slab_bytes);
    if (o.slab_bytes > kHugePageBytes) o.slab_bytes = round_up_to_huge_page(o.slab_bytes);
    return success();
}

Status Pool::make_table(const Incarnation& incarnation) {
    Result<IndexWriter> index = IndexWriter::create(options_.objects_max, incarnation);
    if (!index) return index.error();
    table_ = std::make_unique<ObjectTable>(std::move(*index), allocator_, leases_);
    table_->set_on_space_empty([this](uint32_t space) { close_if_unused(space); });
    return success();
}

Result<Fd> Pool::arena_read_only_fd() const {
    Fd fd(::open(("/proc/self/fd/" + std::to_string(arena_.fd())).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return os_error("reopening the arena read-only");
    return fd;
}

std::optional<Extent> Pool::lease(uint64_t min, uint64_t want) {
    std::optional<Extent> found = find_lease(min, want);
    if (!found) ++share_counters_.refused;
    return found;
}

std::optional<Extent> Pool::find_lease(uint64_t min, uint64_t want) {
    // The arena may have little of its memory now: a slab as of all of it would drive out all that is there.
    if (options_.shares_memory) want = std::min(want, lease_bytes_max());
    // Whole huge pages where it is about that much: a lease that ends inside one would break its mapping up.
    uint64_t align = kPageBytes;
    if (std::max(want, min) >= kHugePageBytes) {
        align = kHugePageBytes;
        want = round_up_to_huge_page(std::max(want, min));
    }
    want = std::max(want, min);
    // While there is memory that no object has had yet, nothing goes for another.
    if (reserving()) reserve_for(min + align);
    publish_free_bytes();
    if (reserving()) return open_lease(min, want, align);
    // Before its own objects go, memory that is lent to others, or that no tenant has.
    if (get_memory(min, want)) {
        if (std::optional<Extent> extent = open_lease(min, want, align)) return extent;
    }
    // Evict by age as long as nothing fits or little is free, but not for the sake of one large piece:
    // objects die scattered, and a smaller lease does as well.
    bool large = min > options_.slab_bytes;
    uint64_t free_wanted = std::max(2 * want, capacity() / 16);
    uint64_t evicted_before = table_->counters().evicted_bytes_total;
    auto short_of_room = [&] {
        return allocator_.largest() < round_up_to_page(min) || allocator_.free_bytes() < free_wanted;
    };
    auto evicted = [&] { return table_->counters().evicted_bytes_total - evicted_before; };
    while (!large && short_of_room() && evicted() < 2 * want && table_->evict_for_memory()) {
    }
    if (std::optional<Extent> extent = open_lease(min, want, align)) return extent;
    // One piece of that size: the window that was used the longest ago, or nothing at all.
    if (!table_->evict_window(min + 2 * kPageBytes)) return std::nullopt;
    return leases_.open(min, want, kPageBytes);
}

// The thread that reserves the memory is mostly ahead; a client that writes faster than the kernel clears
// pages has the next ones reserved here.
void Pool::reserve_for(uint64_t bytes) {
    open_memory();
    auto end = std::chrono::steady_clock::now() + kReserveMs;
    while (reserving() && allocator_.largest() < bytes && std::chrono::steady_clock::now() < end) {
        loop_waits_ = true;
        MutexLock lock(commit_mutex_);
        end_loop_wait();
        // What the thread did meanwhile may be enough.
        bool short_of_it = committed_ == allocator_.capacity() && !commit_next(kCommitBytes).ok();
        lock.unlock();
        if (short_of_it) memory_is_short();
        open_memory();
    }
}

std::optional<Extent> Pool::open_lease(uint64_t min, uint64_t want, uint64_t align) {
    if (std::optional<Extent> extent = leases_.open(min, want, align)) return extent;
    return leases_.open(min, want, kPageBytes);
}

std::optional<uint32_t> Pool::open_space(std::string_view name_space, std::string_view fingerprint,
                                         uint32_t limit) {
    KeyHasher hasher(options_.tenant, name_space, fingerprint, options_.salt);
    auto it = space_ids_.find(hasher.identity());
    if (it == space_ids_.end()) {
        if (spaces() >= limit) return std::nullopt;
        uint32_t id = static_cast<uint32_t>(spaces_.size());
        if (free_spaces_.empty()) {
            spaces_.emplace_back();
        } else {
            id = free_spaces_.back();
            free_spaces_.pop_back();
        }
        it = space_ids_.emplace(hasher.identity(), id).first;
        spaces_[id].hasher = std::move(hasher);
    }
    use_space(it->second);
    return it->second;
}

void Pool::leave_space(uint32_t space) {
    --spaces_[space].users;
    close_if_unused(space);
}

void Pool::close_if_unused(uint32_t space) {
    if (spaces_[space].users != 0 || table_->objects_in(space) != 0) return;
    if (on_space_closed_) on_space_closed_(space);
    space_ids_.erase(identity(space));
    spaces_[space] = Space{};
    free_spaces_.push_back(space);
}

uint64_t Pool::scrub(uint64_t budget) {
    uint64_t dropped = 0;
    for (uint32_t looked = 0; looked < 4096 && budget > 0 && table_->slots_used() > 0; ++looked) {
        if (scrub_.slot >= table_->slots_used()) scrub_ = {};
        uint32_t slot = scrub_.slot;
        if (!table_->committed(slot) || table_->scrubbed(slot)) {
            scrub_ = Scrub{slot + 1};
            continue;
        }
        // A large object takes several turns; one that was replaced in between starts anew.
        if (scrub_.generation != table_->generation(slot)) scrub_ = Scrub{slot, table_->generation(slot)};
        const IndexEntry& entry = table_->entry(slot);
        uint64_t bytes = std::min(budget, entry.size - scrub_.done);
        scrub_.crc = crc32c(scrub_.crc, arena_.data() + entry.offset + scrub_.done, bytes);
        scrub_.done += bytes;
        budget -= bytes;
        if (scrub_.done < entry.size) break;
        if (scrub_.crc == entry.crc) {
            table_->set_scrubbed(slot);
        } else {
            table_->remove(slot);
            ++dropped;
        }
        scrub_ = Scrub{slot + 1};
    }
    return dropped;
}

uint64_t Pool::collapse_memory() {
    if (options_.shares_memory) return collapse_shared();
    constexpr uint64_t kStep = 16u << 20;
    uint64_t done = huge_bytes_;
    uint64_t bytes = std::min(kStep, committed_ - done) / kHugePageBytes * kHugePageBytes;
    if (bytes == 0 || !arena_.collapse(done, bytes)) {
        table_->publish_settled_bytes(committed_);
        return 0;
    }
    huge_bytes_ += bytes;
    table_->publish_settled_bytes(huge_bytes_);
    return bytes;
}

Result<uint64_t> Pool::commit_memory(uint64_t bytes) {
    // A mutex alone could be this thread's again and again.
    while (loop_waits_) loop_waits_.wait(true);
    MutexLock lock(commit_mutex_);
    return commit_next(bytes);
}

Result<uint64_t> Pool::commit_next(uint64_t bytes) {
    bytes = std::min(bytes, options_.start_bytes - arena_.committed());
    if (bytes != 0) {
        if (may_commit_ && !may_commit_(bytes)) {
            return Error{Code::kUnavailable, "others have taken the memory meanwhile"};
        }
        if (Status status = arena_.commit(bytes); !status) return status.error();
    }
    committed_ = arena_.committed();
    return bytes;
}

void Pool::open_memory() {
    // With what is absent behind it the arena is complete already.
    if (allocator_.capacity() < start_bytes()) allocator_.grow(committed_ - allocator_.capacity());
    if (!reserving()) add_absent();
    publish_free_bytes();
}

void Pool::memory_is_short() {
    open_memory();
    memory_short_ = true;
    add_absent();
}

}  // namespace moonpool
