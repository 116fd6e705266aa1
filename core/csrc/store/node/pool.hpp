// Pool: all that a node keeps for one tenant: its arena, what is free in it, its objects and its spaces.
// Tenants share nothing. The node's loop owns it; only commit_memory() may run on another thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "memory/allocator.hpp"
#include "memory/leases.hpp"
#include "memory/mapping.hpp"
#include "store/node/byte_rate.hpp"
#include "store/node/object_table.hpp"
#include "store/node/remote_pins.hpp"
#include "store/node/tenant_limits.hpp"
#include "store/shared/space.hpp"
#include "wire/limits.hpp"

namespace moonpool {

struct PoolOptions {
    std::string tenant = "default";
    uint64_t arena_bytes = 0;
    // 0: one per KiB of arena, at least 4,096, up to 8 Mi, and beyond that one per 64 KiB. Their tables take
    // memory as they are used only.
    uint32_t objects_max = 0;
    uint64_t slab_bytes = 0;  // 0: 1/128 of the arena, between 256 KiB and 8 MiB
    double object_share = 0.25;
    // Pieces of its memory come from and go to other tenants (MemoryShares): it begins with start_bytes, and
    // may get all of arena_bytes. No card pins memory of it, which would read what was there before.
    bool shares_memory = false;
    uint64_t start_bytes = 0;  // 0: all
    std::string salt{};        // of the hashes of its keys (store/shared/space.hpp); empty: none
};

class Pool {
   public:
    static Result<std::unique_ptr<Pool>> create(const PoolOptions& options, const Incarnation& incarnation);

    // ---- from one process to another (pool_handed.cpp)

    // What another process holds of a tenant: its arena, and what lies in it.
    struct Handed {
        const HandedPool& pool;
        Fd arena;
        std::vector<Extent> leases;                   // of all connections
        std::unordered_map<uint32_t, uint32_t> pins;  // of each slot
    };
    // With the objects of another process. Spaces have no user until use_space(); drop_unused_spaces() then
    // closes those without objects.
    static Result<std::unique_ptr<Pool>> adopt(const PoolOptions& options, const Incarnation& incarnation,
                                               Handed handed);
    HandedPool give();
    bool has_space(uint32_t space) const { return space < spaces_.size() && !identity(space).empty(); }
    void drop_unused_spaces();

    // A lease of at least `min` bytes, up to `want`: page aligned. Evicts as needed, once all of the arena's
    // memory is reserved. Nothing when pins and other leases stand in the way, or when the memory for it
    // could not be reserved in kReserveMs.
    std::optional<Extent> lease(uint64_t min, uint64_t want);
    Leases& leases() { return leases_; }

    // The id of a space, which the caller uses from now on, until leave_space(); nothing when the tenant has
    // too many. One without users is given back with its last object in memory; what a disk has of it is
    // found again under its names.
    std::optional<uint32_t> open_space(std::string_view name_space, std::string_view fingerprint,
                                       uint32_t limit);
    void use_space(uint32_t space) { ++spaces_[space].users; }
    void leave_space(uint32_t space);
    size_t spaces() const { return space_ids_.size(); }
    // Told of each id that is given back: it may become another space's.
    void set_on_space_closed(std::function<void(uint32_t space)> f) { on_space_closed_ = std::move(f); }
    Hash128 hash(uint32_t space, std::string_view name) const { return spaces_[space].hasher(name); }
    const std::string& identity(uint32_t space) const { return spaces_[space].hasher.identity(); }
    // What the identity of each of its spaces has before the first 0.
    std::string owner() const {
        std::string of_any = KeyHasher(tenant(), "", "", salt()).identity();
        return of_any.substr(0, of_any.find('\0'));
    }
    // Always "tenant 0 namespace 0 fingerprint".
    std::string unsalted_identity(uint32_t space) const {
        return tenant() + identity(space).substr(identity(space).find('\0'));
    }
    uint32_t find(uint32_t space, std::string_view name) const {
        return table_->find(space, hash(space, name), name);
    }

    // Verifies up to `budget` bytes of objects that were not verified since they came to memory; drops an
    // object whose bytes do not match its checksum. Returns the number dropped.
    uint64_t scrub(uint64_t budget);

    RemotePins& remote_pins() { return remote_pins_; }
    const RemotePins& remote_pins() const { return remote_pins_; }
    ObjectTable& table() { return *table_; }
    const ObjectTable& table() const { return *table_; }
    const std::string& tenant() const { return options_.tenant; }
    const std::string& salt() const { return options_.salt; }
    uint64_t slab_bytes() const { return options_.slab_bytes; }
    uint64_t object_bytes_max() const {
        return static_cast<uint64_t>(static_cast<double>(options_.arena_bytes) * options_.object_share);
    }
    uint64_t arena_bytes() const { return options_.arena_bytes; }
    // Of the arena, what its tenant has from the node's start.
    uint64_t start_bytes() const { return options_.start_bytes; }
    uint64_t free_bytes() const { return allocator_.free_bytes(); }
    // Memory that there is, in use or free.
    uint64_t capacity() const { return allocator_.capacity() - absent_.free_bytes(); }
    // The same, with what is still being reserved.
    uint64_t held_bytes() const { return reserving() ? options_.start_bytes : capacity(); }
    // What shares of the arena are of: its size, or what a tenant with a changing one has now.
    uint64_t size_now() const { return options_.shares_memory ? held_bytes() : options_.arena_bytes; }
    // Whether one client may lease so much more, beside what it leases already: so that it, leaking or
    // hostile, leaves half of the memory to the others. Of a size that changes, half of what could be had
    // now; a first lease is for what is had then.
    bool may_lease(uint64_t leased, uint64_t more) const {
        if (options_.shares_memory && leased == 0) return true;
        return leased + more <= (size_now() + obtainable_bytes_) / 2;
    }
    int arena_fd() const { return arena_.fd(); }
    Result<Fd> arena_read_only_fd() const;
    const std::byte* data() const { return arena_.data(); }
    std::byte* writable() const { return arena_.writable(); }

    // Asked before each piece is reserved, on any thread: whether this host still has so many bytes.
    void guard_commits(std::function<bool(uint64_t)> may_commit) { may_commit_ = std::move(may_commit); }
    uint64_t committed_bytes() const { return committed_; }
    // Reserves the next piece of the arena's memory, on any thread but the loop, which goes first; 0: there
    // is no more.
    static constexpr uint64_t kCommitBytes = 32ull << 20;
    Result<uint64_t> commit_memory(uint64_t bytes = kCommitBytes) EXCLUDES(commit_mutex_);
    // Opens to the allocator what has been reserved since (the loop).
    void open_memory();
    // Memory that is still being reserved counts as free: a node that has just started is not full, and
    // neither a client nor the master shall put elsewhere for that.
    uint64_t room_bytes() const {
        return free_bytes() + (reserving() ? start_bytes() - capacity() : 0) + obtainable_bytes_;
    }
    void publish_free_bytes() { table_->publish_free_bytes(room_bytes() - free_bytes()); }
    void memory_is_short();  // no more will come
    bool reserving() const { return !memory_short_ && allocator_.capacity() < start_bytes(); }

    // ---- memory that moves between tenants (shares_memory), on the loop

    // In whole pieces of so many bytes, at multiples of them.
    uint64_t grain_bytes() const { return grain_bytes_; }
    // Told when a lease finds too little: gets `bytes`, `piece` of them at one place. -> how many it got.
    using OnShort = std::function<uint64_t(Pool&, uint64_t bytes, uint64_t piece)>;
    void set_on_short(OnShort f) { on_short_ = std::move(f); }
    // Gives memory back to the system, and evicts up to so many objects for it by age; where these leave
    // holes, those of one window of the arena go besides. -> how many bytes; fewer where pins and leases
    // stand in the way, or more objects would have to go. 0, and nothing is evicted, where nothing can come
    // free.
    uint64_t give_back(uint64_t bytes, uint64_t evict_max) EXCLUDES(commit_mutex_);
    // Free memory beyond what its next puts need.
    uint64_t idle_bytes() const {
        uint64_t kept = capacity() / 8 + 2 * lease_bytes_max();
        return free_bytes() - std::min(free_bytes(), kept);
    }
    // Reserves memory that was given back, or never there. -> how many bytes.
    uint64_t take_memory(uint64_t bytes, uint64_t piece) EXCLUDES(commit_mutex_);
    // Gives back pages of absent memory that a process has touched. A client that copies an object while it
    // is evicted gets zeros, and discards them.
    void drop_strays() EXCLUDES(commit_mutex_);
    // What a lease could get beyond free_bytes(); others are told of it as free.
    void set_obtainable_bytes(uint64_t bytes) { obtainable_bytes_ = bytes; }
    struct ShareCounters {
        uint64_t taken_bytes = 0, given_bytes = 0;  // of memory
        uint64_t evicted = 0, evicted_bytes = 0;    // objects, for memory that was given back
        uint64_t refused = 0;                       // leases
        uint64_t over_rate = 0;                     // objects, and leases
    };
    const ShareCounters& share_counters() const { return share_counters_; }
    const TenantLimits& limits() const { return limits_; }
    void set_limits(const TenantLimits& limits) { limits_ = limits; }
    // Whether the tenant has moved more than limits().bytes_per_s: what it asks for is refused for a while.
    bool is_over_rate(uint64_t now_ms) { return rate_.is_over(limits_.bytes_per_s, now_ms); }
    void moved(uint64_t bytes, uint64_t now_ms) {
        if (!limits_.bytes_per_s) return;
        (void)rate_.is_over(limits_.bytes_per_s, now_ms);
        rate_.take(bytes);
    }
    void count_over_rate(uint64_t objects) { share_counters_.over_rate += objects; }
    // Makes huge pages of the next piece of committed memory (any thread); 0: all is done, or the kernel does
    // not. The shared index says how far it is: clients pin what stays as it is only. After a 0 that is all
    // that is committed.
    uint64_t collapse_memory();
    uint64_t huge_bytes() const { return huge_bytes_; }

    bool check_integrity() const { return table_->check_integrity(); }

   private:
    // How long one lease may hold up the loop for memory that is not reserved yet: longer than any piece
    // takes, shorter than a client waits.
    static constexpr std::chrono::milliseconds kReserveMs{500};
    static constexpr uint64_t kSlabMin = 256u << 10, kSlabMax = 8u << 20;

    Pool() = default;
    Status set_sizes(const PoolOptions& options);
    Status make_table(const Incarnation& incarnation);
    void adopt_spaces(const HandedPool& handed);
    void adopt_memory(const Handed& handed);
    Result<uint64_t> commit_next(uint64_t bytes) REQUIRES(commit_mutex_);
    void reserve_for(uint64_t bytes);
    void set_grain();
    void add_absent();
    uint64_t collapse_shared() EXCLUDES(commit_mutex_);
    bool make_grains(uint64_t bytes, uint64_t evict_max);
    bool get_memory(uint64_t min, uint64_t want);
    uint64_t lease_bytes_max() const { return std::clamp(size_now() / 128, kSlabMin, kSlabMax); }
    // The loop has the commit_mutex_: a mutex alone could be the other thread's again and again.
    void end_loop_wait() {
        loop_waits_ = false;
        loop_waits_.notify_all();
    }
    std::optional<Extent> find_lease(uint64_t min, uint64_t want);
    std::optional<Extent> open_lease(uint64_t min, uint64_t want, uint64_t align);

    PoolOptions options_;
    Arena arena_;
    ExtentAllocator allocator_;
    Leases leases_{allocator_};
    std::unique_ptr<ObjectTable> table_;
    struct Space {
        KeyHasher hasher;
        uint32_t users = 0;
    };
    void close_if_unused(uint32_t space);
    std::unordered_map<std::string, uint32_t> space_ids_;
    std::vector<Space> spaces_;
    std::vector<uint32_t> free_spaces_;
    std::function<void(uint32_t)> on_space_closed_;
    RemotePins remote_pins_;
    struct Scrub {  // where the background verification stands
        uint32_t slot = 0;
        uint64_t generation = 0;
        uint64_t done = 0;  // bytes of that object
        uint32_t crc = 0;
    };
    Scrub scrub_;
    bool memory_short_ = false;
    // Of the arena, what has no memory. It is absent_'s free space, and allocated in allocator_. Changed on
    // the loop, under the commit_mutex_ together with the arena: the thread that gathers pages must not bring
    // back what was given away.
    ExtentAllocator absent_;
    uint64_t grain_bytes_ = 0;
    uint64_t obtainable_bytes_ = 0;
    uint64_t collapsed_ = 0;  // of the arena, looked at by collapse_shared()
    OnShort on_short_;
    ShareCounters share_counters_;
    TenantLimits limits_;
    ByteRate rate_;
    Mutex commit_mutex_;  // of the arena's growth: its pieces are committed one after the other
    std::function<bool(uint64_t)> may_commit_;
    std::atomic<bool> loop_waits_{false};
    std::atomic<uint64_t> committed_{0};
    std::atomic<uint64_t> huge_bytes_{0};
};

}  // namespace moonpool
