#include "store/node/holdings.hpp"

#include <algorithm>
#include <iterator>

namespace moonpool {

namespace {

constexpr uint32_t kSlotsPerPiece = 4096;  // looked at in one go: others wait meanwhile, about 0.2 ms
constexpr uint32_t kDropsPerPiece = 1024;  // the same; each asks every disk

Hash128 hash_in(const IndexEntry& entry) { return Hash128{entry.hash_low, entry.hash_high}; }

}  // namespace

uint64_t Holdings::inventory(uint64_t cursor, std::vector<DeltaRow>& rows, const Range& range) const {
    uint64_t pool_number = cursor >> 32;
    auto slot = static_cast<uint32_t>(cursor);
    size_t devices = ssd_ == nullptr ? 0 : ssd_->devices();
    auto next_part = [&] { return pool_number + 1 < pools_.size() + devices ? (pool_number + 1) << 32 : 0; };
    if (pool_number >= pools_.size()) {
        size_t device = pool_number - pools_.size();
        if (device >= devices) return 0;
        std::vector<Hash128> hashes;
        slot = ssd_->hashes(device, slot, kSlotsPerPiece, hashes);
        for (const Hash128& hash : hashes) {
            if (range.contains(hash)) rows.push_back({hash, Tier::kSsd, true});
        }
        return slot != 0 ? pool_number << 32 | slot : next_part();
    }
    const ObjectTable& table =
        std::next(pools_.begin(), static_cast<std::ptrdiff_t>(pool_number))->second->table();
    uint32_t end = std::min(table.slots_used(), slot + kSlotsPerPiece);
    for (; slot < end; ++slot) {
        if (!table.committed(slot)) continue;
        Hash128 hash = hash_in(table.entry(slot));
        if (range.contains(hash)) rows.push_back({hash, Tier::kDram, true});
    }
    return slot < table.slots_used() ? pool_number << 32 | slot : next_part();
}

NodeLoad Holdings::load(uint64_t now_ms) {
    NodeLoad load;
    for (auto& [tenant, pool] : pools_) {
        const ObjectTable& table = pool->table();
        UseClock& clock = use_clocks_[tenant];
        clock.sample(now_ms, table.uses());
        load.tenants.push_back(TenantLoad{tenant, pool->arena_bytes(), pool->room_bytes(),
                                          table.counters().objects,
                                          clock.age_ms(now_ms, table.oldest_use())});
    }
    return load;
}

bool Holdings::empty() const {
    for (size_t device = 0; ssd_ != nullptr && device < ssd_->devices(); ++device) {
        std::vector<Hash128> hashes;
        uint32_t cursor = 0;
        do {
            cursor = ssd_->hashes(device, cursor, kSlotsPerPiece, hashes);
        } while (cursor != 0 && hashes.empty());
        if (!hashes.empty()) return false;
    }
    return std::ranges::all_of(
        pools_, [](const auto& entry) { return entry.second->table().counters().objects == 0; });
}

void Holdings::drop(const Drop& drop) {
    removals_.add(drop.hash, drop.version);
    for (auto& [tenant, pool] : pools_) {
        ObjectTable& table = pool->table();
        uint32_t slot = table.find(drop.hash);
        if (slot == kNoSlot) continue;
        if (table.version(slot) < drop.version) {
            table.remove(slot);
        } else {
            table.tell_again(slot);
        }
    }
    if (ssd_ != nullptr && ssd_->forget_older(drop.hash, drop.version)) ssd_->tell_again(drop.hash);
}

uint32_t Holdings::drop_some(Pool& pool, uint32_t cursor, Version before, const Range& range) {
    ObjectTable& table = pool.table();
    uint32_t stop = std::min(table.slots_used(), cursor + kDropsPerPiece);
    for (; cursor < stop; ++cursor) {
        if (!table.committed(cursor) || table.version(cursor) >= before) continue;
        Hash128 hash = hash_in(table.entry(cursor));
        if (!range.contains(hash)) continue;
        table.remove(cursor);
        if (ssd_ != nullptr) (void)ssd_->forget_older(hash, before);
    }
    return cursor < table.slots_used() ? cursor : 0;
}

uint32_t Holdings::drop_some_of_disk(size_t device, uint32_t cursor, Version before, const Range& range) {
    std::vector<Hash128> hashes;
    cursor = ssd_->hashes(device, cursor, kDropsPerPiece, hashes);
    for (const Hash128& hash : hashes) {
        if (range.contains(hash)) (void)ssd_->forget_older(hash, before);
    }
    return cursor;
}

}  // namespace moonpool
