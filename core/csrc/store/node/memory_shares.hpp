// MemoryShares: how the tenants of a node share its memory. Each has a minimum, which is its own, and a
// maximum. Memory above the minimums is lent: to the tenants that need it, until all of them are equally far
// above their minimums, or at their maximums.
//
// A tenant that needs memory gets what no tenant has, then what others have free, and else what the tenant
// gives back that is furthest above its minimum, which evicts objects for it. Of that so much only that the
// giver stays as far above its minimum as the taker: two tenants that both need memory do not take the same
// piece from each other in turn. A tenant's minimum is never given away.
//
// An arena stays a file of one tenant: what moves is a piece of memory (Pool::give_back, Pool::take_memory),
// which the kernel clears on its way, and never an address or a byte.
//
// A tenant without a minimum or maximum has the memory that the node's settings give it, and nothing moves.
// The node's loop owns it. Cost: O(tenants with limits) whenever a tenant is short of memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "store/node/pool.hpp"
#include "store/node/tenant_limits.hpp"

namespace moonpool {

class MemoryShares {
   public:
    struct Bounds {
        uint64_t min = 0, max = 0;
    };
    // What limits mean for a tenant for which the node's settings have so many bytes.
    static Bounds bounds(const TenantLimits& limits, uint64_t configured_bytes);
    static bool limits_memory(const TenantLimits& limits) { return limits.dram_min || limits.dram_max; }
    // The options of a tenant's pool with its limits in force.
    static void apply(PoolOptions& options, const TenantLimits& limits);
    // The same for an arena that another process has made, perhaps with other limits: it keeps its size. ->
    // as limits_memory(), and also where memory of it has moved by then; not where it was made in odd pieces.
    static bool apply_to(const HandedPool& made, PoolOptions& options, const TenantLimits& limits);
    // An error, in one sentence, where the minimums are more than there is.
    static Status check(const std::vector<PoolOptions>& pools, const LimitsByTenant& limits);

    // configured_bytes: of the tenant in the node's settings. The pool asks for memory here from now on.
    void add(Pool& pool, uint64_t configured_bytes, const TenantLimits& limits);
    // New limits. -> what cannot come into force before the node starts anew, a sentence each.
    Result<std::vector<std::string>> set(const LimitsByTenant& limits);

    void set_get_ms(std::chrono::milliseconds ms) { get_ms_ = ms; }  // for tests
    // Gets up to `bytes` for a pool; piece: if it can be, so many of them at one place. -> how many it got.
    uint64_t get(Pool& taker, uint64_t bytes, uint64_t piece);
    // Takes back what is held above a maximum that was lowered, a part at a time; and tells each pool what it
    // could get; and looks after one of them (Pool::drop_strays).
    void on_tick();

    bool empty() const { return tenants_.empty(); }
    const Bounds* of(const Pool& pool) const;

   private:
    static constexpr uint64_t kTickBytes = 64ull << 20;  // that one tick takes back of one tenant,
    static constexpr uint64_t kTickObjects = 4096;       // and what it evicts by age for that, a few ms
    static constexpr uint32_t kTickSorts = 50'000;       // objects for each tick that it then pauses
    static constexpr uint64_t kGetBytes = 64ull << 20;   // that one need gets, unless one object is larger,
    static constexpr uint64_t kLargeObjects = 65'536;  // for which as many are evicted in each part of that,
    static constexpr size_t kGiversMax = 4;            // that are tried for one need, in each way
    static constexpr size_t kStraysMax = 8;            // tenants that one tick looks after
    static constexpr int kRestTicks = 30;              // of 100 ms

    struct Tenant {
        Pool* pool;
        uint64_t configured_bytes;
        Bounds bounds;
        // Ticks until it is asked again for what it uses: pins stood in the way.
        int resting = 0;
        uint64_t coming = 0;  // given back for it by others, and not taken yet
        // How far it is above its minimum; negative: below. Of the minimum only whole grains count, for
        // between two tenants nothing less moves.
        int64_t over() const {
            uint64_t min = bounds.min / pool->grain_bytes() * pool->grain_bytes();
            return static_cast<int64_t>(pool->held_bytes() + coming) - static_cast<int64_t>(min);
        }
    };
    Tenant* find(const Pool& pool);
    uint64_t spare() const;
    using Most = uint64_t (*)(const Tenant& giver, const Tenant& taker);
    static uint64_t unused(const Tenant& giver, const Tenant& taker);
    static uint64_t above_share(const Tenant& giver, const Tenant& taker);
    uint64_t collect(const Tenant& taker, uint64_t bytes, Most most, uint64_t evict_max);
    uint64_t collect_shares(Tenant& taker, uint64_t bytes, uint64_t needed);
    uint64_t could_give(const Tenant& taker) const;
    uint64_t take(Tenant& taker, uint64_t bytes, uint64_t piece);

    std::chrono::milliseconds get_ms_{500};  // and no part is begun after so long
    std::vector<Tenant> tenants_;            // with limits of memory since the node's start
    uint64_t total_ = 0;                     // bytes of all of them together
    uint64_t missing_ = 0;                   // of these, what the host did not have when it was to be taken
    int missing_ticks_ = 0;                  // until it is tried again
    size_t looked_at_ = 0;                   // by the last tick
};

}  // namespace moonpool
