#include "store/node/memory_shares.hpp"

#include <algorithm>

#include "memory/room.hpp"

namespace moonpool {

namespace {

Error too_much(uint64_t minimums, uint64_t total) {
    return Error{Code::kInvalidArgument,
                 "cluster.tenants_file: the minimums (dram_min) of the tenants of this node are " +
                     size_text(minimums) + " in all, and node.dram and node.tenants give those tenants " +
                     size_text(total) + "; lower dram_min, or give more memory"};
}

}  // namespace

MemoryShares::Bounds MemoryShares::bounds(const TenantLimits& limits, uint64_t configured_bytes) {
    Bounds b;
    b.max = limits.dram_max.value_or(std::max(configured_bytes, limits.dram_min.value_or(0)));
    b.min = limits.dram_min.value_or(std::min(configured_bytes, b.max));
    return b;
}

void MemoryShares::apply(PoolOptions& options, const TenantLimits& limits) {
    if (!limits_memory(limits)) return;
    uint64_t configured = options.arena_bytes;
    Bounds b = bounds(limits, configured);
    options.shares_memory = true;
    options.arena_bytes = std::max(configured, b.max);
    options.start_bytes = std::min(configured, b.max);
}

bool MemoryShares::apply_to(const HandedPool& made, PoolOptions& options, const TenantLimits& limits) {
    const uint64_t configured = options.arena_bytes;
    const bool moved = !made.absent.empty();
    if (!moved && (!limits_memory(limits) || made.arena_bytes % kHugePageBytes != 0)) return false;
    apply(options, limits);
    options.shares_memory = true;
    if (options.start_bytes == 0) options.start_bytes = configured;
    if (made.arena_bytes >= configured) options.arena_bytes = made.arena_bytes;
    return true;
}

Status MemoryShares::check(const std::vector<PoolOptions>& pools, const LimitsByTenant& limits) {
    uint64_t total = 0, minimums = 0;
    for (const PoolOptions& pool : pools) {
        auto it = limits.find(pool.tenant);
        if (it == limits.end() || !limits_memory(it->second)) continue;
        total += pool.arena_bytes;
        minimums += bounds(it->second, pool.arena_bytes).min;
    }
    if (minimums > total) return too_much(minimums, total);
    return success();
}

void MemoryShares::add(Pool& pool, uint64_t configured_bytes, const TenantLimits& limits) {
    tenants_.push_back({&pool, configured_bytes, bounds(limits, configured_bytes)});
    total_ += configured_bytes;
    pool.set_on_short(
        [this](Pool& taker, uint64_t bytes, uint64_t piece) { return get(taker, bytes, piece); });
}

Result<std::vector<std::string>> MemoryShares::set(const LimitsByTenant& limits) {
    auto bounds_now = [&](const Tenant& tenant) {
        auto it = limits.find(tenant.pool->tenant());
        return bounds(it == limits.end() ? TenantLimits{} : it->second, tenant.configured_bytes);
    };
    uint64_t minimums = 0;
    for (const Tenant& tenant : tenants_) minimums += bounds_now(tenant).min;
    if (minimums > total_) return too_much(minimums, total_);
    std::vector<std::string> later;
    for (Tenant& tenant : tenants_) {
        tenant.bounds = bounds_now(tenant);
        if (tenant.bounds.max <= tenant.pool->arena_bytes()) continue;
        later.push_back("dram_max of tenant " + tenant.pool->tenant() + " is above the " +
                        size_text(tenant.pool->arena_bytes()) +
                        " that its arena was made for: more comes into force when the node starts anew");
    }
    return later;
}

MemoryShares::Tenant* MemoryShares::find(const Pool& pool) {
    auto it = std::ranges::find(tenants_, &pool, &Tenant::pool);
    return it == tenants_.end() ? nullptr : &*it;
}

const MemoryShares::Bounds* MemoryShares::of(const Pool& pool) const {
    auto it = std::ranges::find(tenants_, &pool, &Tenant::pool);
    return it == tenants_.end() ? nullptr : &it->bounds;
}

// Memory that no tenant holds, nor will get with its arena's first reservation.
uint64_t MemoryShares::spare() const {
    uint64_t held = 0;
    for (const Tenant& tenant : tenants_) held += tenant.pool->held_bytes();
    return total_ - std::min(total_, held + missing_);
}

// Memory of a giver that has nothing in it, above its minimum.
uint64_t MemoryShares::unused(const Tenant& giver, const Tenant&) {
    return std::min(giver.pool->idle_bytes(), static_cast<uint64_t>(std::max(giver.over(), int64_t{0})));
}

// How much a giver may give of what it uses: nothing of its minimum; and beyond what the taker lacks of its
// own, only as much as leaves the giver no closer to its minimum than the taker.
uint64_t MemoryShares::above_share(const Tenant& giver, const Tenant& taker) {
    int64_t most = std::max(-taker.over(), (giver.over() - taker.over()) / 2);
    return static_cast<uint64_t>(std::max(std::min(most, giver.over()), int64_t{0}));
}

// From those first that have the most.
uint64_t MemoryShares::collect(const Tenant& taker, uint64_t bytes, Most most, uint64_t evict_max) {
    uint64_t got = 0;
    std::vector<const Tenant*> tried{&taker};
    while (got < bytes && tried.size() <= kGiversMax) {
        Tenant* giver = nullptr;
        for (Tenant& each : tenants_) {
            if (each.pool->reserving() || std::ranges::find(tried, &each) != tried.end()) continue;
            if (evict_max != 0 && each.resting != 0) continue;
            if (giver == nullptr || most(each, taker) > most(*giver, taker)) giver = &each;
        }
        if (giver == nullptr) break;
        uint64_t grain = std::max(giver->pool->grain_bytes(), taker.pool->grain_bytes());
        uint64_t wanted = std::min(most(*giver, taker), bytes - got) / grain * grain;
        if (wanted == 0) break;  // the others have less
        tried.push_back(giver);
        uint64_t given = giver->pool->give_back(wanted, evict_max);
        if (evict_max != 0 && given < wanted) giver->resting = kRestTicks;
        got += given;
    }
    return got;
}

// At most, of what they use; fewer where pins stand in the way.
uint64_t MemoryShares::could_give(const Tenant& taker) const {
    uint64_t bytes = 0;
    for (const Tenant& giver : tenants_) {
        if (&giver == &taker || giver.pool->reserving() || giver.resting != 0) continue;
        bytes += above_share(giver, taker);
    }
    return bytes;
}

// Of what others use, up to `bytes`, a part at a time: each evicts so much only, and looks anew which tenant
// has the most. Nothing is evicted where what is needed does not come together all the same.
uint64_t MemoryShares::collect_shares(Tenant& taker, uint64_t bytes, uint64_t needed) {
    const auto end = std::chrono::steady_clock::now() + get_ms_;
    const uint64_t evict_max = bytes > kGetBytes ? kLargeObjects : kTickObjects;
    while (taker.coming < bytes && taker.coming + could_give(taker) >= needed) {
        uint64_t got = collect(taker, std::min(bytes - taker.coming, kGetBytes), above_share, evict_max);
        taker.coming += got;
        if (got == 0 || std::chrono::steady_clock::now() >= end) break;
    }
    return std::exchange(taker.coming, 0);
}

// Memory that no tenant has. What the host lacks, though it was said to be the tenants', is no more counted
// on for a while.
uint64_t MemoryShares::take(Tenant& taker, uint64_t bytes, uint64_t piece) {
    uint64_t taken = taker.pool->take_memory(bytes, piece);
    if (taken < bytes) {
        missing_ += bytes - taken;
        missing_ticks_ = kRestTicks;
    }
    return taken;
}

uint64_t MemoryShares::get(Pool& pool, uint64_t bytes, uint64_t piece) {
    Tenant* taker = find(pool);
    if (taker == nullptr || pool.reserving()) return 0;
    uint64_t grain = pool.grain_bytes();
    uint64_t most = std::min(taker->bounds.max, pool.arena_bytes());
    bytes = std::min((bytes + grain - 1) / grain * grain,
                     (most - std::min(most, pool.held_bytes())) / grain * grain);
    bytes = std::min(bytes, std::max((piece + grain - 1) / grain * grain, kGetBytes));
    uint64_t taken = 0;
    // Once more where the host has less than the tenants were to have: then others' memory is all there is.
    for (int tries = 0; tries < 2 && taken < bytes; ++tries) {
        uint64_t lacks = bytes - taken;
        uint64_t there = spare() / grain * grain;
        if (there < lacks) there += collect(*taker, lacks - there, unused, 0);
        uint64_t needed = std::min(piece, bytes) - std::min({piece, bytes, taken});
        if (there < lacks) there += collect_shares(*taker, lacks - there, needed - std::min(needed, there));
        there = std::min(lacks, there);
        if (there == 0) break;
        uint64_t got = take(*taker, there, taken == 0 ? piece : 0);
        taken += got;
        if (got == there) break;
    }
    return taken;
}

void MemoryShares::on_tick() {
    if (tenants_.empty()) return;
    for (Tenant& tenant : tenants_) {
        Pool& pool = *tenant.pool;
        if (tenant.resting != 0) --tenant.resting;
        if (tenant.resting != 0 || pool.reserving() || pool.held_bytes() <= tenant.bounds.max) continue;
        uint64_t wanted = std::min(pool.held_bytes() - tenant.bounds.max, kTickBytes);
        // Less may be the maximum of objects; none are pins.
        uint64_t given = pool.give_back(wanted, kTickObjects);
        tenant.resting = given == 0 ? kRestTicks : static_cast<int>(pool.table().slots_used() / kTickSorts);
    }
    if (missing_ticks_ != 0 && --missing_ticks_ == 0) missing_ = 0;
    for (size_t i = 0; i < std::min(kStraysMax, tenants_.size()); ++i) {
        looked_at_ = (looked_at_ + 1) % tenants_.size();
        tenants_[looked_at_].pool->drop_strays();
    }
    uint64_t there = spare();
    const Tenant& lender = *std::ranges::max_element(tenants_, {}, &Tenant::over);
    for (Tenant& tenant : tenants_) {
        uint64_t held = tenant.pool->held_bytes();
        auto above = [held](uint64_t bytes) { return bytes - std::min(bytes, held); };
        uint64_t lent = &lender == &tenant ? 0 : above_share(lender, tenant);
        uint64_t could = std::max(there + lent, above(tenant.bounds.min));
        tenant.pool->set_obtainable_bytes(std::min(could, above(tenant.bounds.max)));
    }
}

}  // namespace moonpool
