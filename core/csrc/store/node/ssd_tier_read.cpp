// SsdTier, reading: promotions.
//
// Memory that is being read from a disk belongs to a lease without a connection (Promotion::lease); its end
// frees what was not committed.

#include "store/node/ssd_tier.hpp"

namespace moonpool {

// Several askers of one key share one read. False: there is nothing to wait for, and the asker answers
// without the object.
bool SsdTier::promote(Pool& pool, uint32_t space, std::string_view name, Then then) {
    Tenant& tenant = tenant_of(pool);
    Hash128 hash = pool.hash(space, name);
    auto [it, fresh] = promotions_.try_emplace({hash.high, hash.low});
    Promotion& p = it->second;
    if (!fresh) {
        // Two names of one hash at a time: the second is treated as a miss.
        if (p.name != name) return false;
        p.waiting.push_back(std::move(then));
        return true;
    }
    p.tenant = &tenant;
    p.space = space;
    p.name = name;
    for (p.device = 0; p.device < devices_.size(); ++p.device) {
        ssd::Key k = key(tenant, p.device, space, hash, name);
        std::optional<ssd::Found> found = devices_[p.device]->find(k, true);
        if (!found || found->size > pool.object_bytes_max()) continue;
        p.found = std::move(*found);
        if (p.found.size != 0) p.lease = pool.lease(p.found.size, p.found.size);
        if (p.found.size != 0 && !p.lease) break;
        std::span<std::byte> to;
        if (p.lease) to = {pool.writable() + p.lease->offset, p.found.size};
        auto done = [this, hash](ssd::Outcome outcome) {
            post_([this, hash, outcome] { promoted(hash, outcome); });
        };
        if (devices_[p.device]->read(k, to, std::move(done))) {
            p.waiting.push_back(std::move(then));
            // The space must not be closed, and its number given away, while the read is under way;
            // promoted() leaves it.
            pool.use_space(space);
            return true;
        }
        if (p.lease) pool.leases().close(p.lease->offset);
        break;
    }
    promotions_.erase(it);
    return false;
}

void SsdTier::promoted(const Hash128& hash, ssd::Outcome outcome) {
    auto node = promotions_.extract({hash.high, hash.low});
    if (node.empty()) return;
    Promotion& p = node.mapped();
    Pool& pool = *p.tenant->pool;
    ObjectTable& table = pool.table();
    uint32_t slot = kNoSlot;
    // What was removed or replaced while it was read must not come back.
    // A put of the same key in the meantime has made the record vanish (on_replace) or the commit below
    // find the key there.
    std::optional<uint64_t> sequence = devices_[p.device]->sequence(hash);
    if (outcome == ssd::Outcome::kDone && sequence == p.found.sequence) {
        Extent extent;
        if (p.lease) extent = Extent{p.lease->offset, p.found.size};
        if (extent.size == 0 || pool.leases().commit(extent)) {
            uint32_t parent = p.found.parent.empty() ? kNoSlot : pool.find(p.space, p.found.parent);
            promoting_ = true;
            auto stored = table.commit(p.space, hash, p.name, extent, p.found.crc, parent, false,
                                       RetentionHints{}, p.found.version);
            promoting_ = false;
            if (stored != ObjectTable::Commit::kStored) pool.leases().free(extent);
            // Also when a put was faster: the askers get that object.
            slot = table.find(p.space, hash, p.name);
            if (stored == ObjectTable::Commit::kStored) {
                table.set_saved(slot, true);
                // The log has compared the checksum.
                table.set_scrubbed(slot);
                ++promoted_total_;
                promoted_bytes_total_ += p.found.size;
                p.tenant->promoted_bytes += p.found.size;
            }
        }
    } else {
        ++promote_failed_total_;
    }
    if (slot != kNoSlot) table.pin(slot);  // until every waiting callback has run
    if (p.lease) pool.leases().close(p.lease->offset);
    uint64_t generation = slot == kNoSlot ? 0 : table.generation(slot);
    // Callbacks may commit, evict or end connections; node and pin above keep what is used here alive.
    for (Then& then : p.waiting) then(slot);
    if (slot != kNoSlot) table.unpin(slot, generation);
    pool.leave_space(p.space);
    if (!p.tenant->resting) clean(*p.tenant);
}

}  // namespace moonpool
