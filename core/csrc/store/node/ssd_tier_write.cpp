// SsdTier, writing.
//
// Per tenant there is a queue `dirty` of objects that no disk has, oldest first as far as it is known: an
// object that was used since it was queued goes to the back when its turn comes. clean() writes from its
// front until enough of the arena is clean, which means free, saved, or being written.
#include <algorithm>
#include <unordered_set>

#include "store/node/ssd_tier.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kWritesMax = 64;               // objects that are held while they are written,
constexpr uint64_t kWriteBytesMax = 64ull << 20;  // and their bytes, unless it is one
constexpr size_t kMatesMax = 64;                  // of a group that is written in one go
constexpr uint32_t kTrimMax = 1024;               // objects that go in one go, for a tenant's limit
constexpr uint64_t kRecordBesides = 8u << 10;     // of a record, beside its object: header and rounding
constexpr uint64_t kDeadMax = 1024;               // entries of a queue, beside two for each object
constexpr int kLooksMax = 1024;                   // at objects that may be written, in one go
constexpr uint32_t kLostPerTick = 65536;          // entries of a directory that is given up

}  // namespace

void SsdTier::step() {
    for (auto& log : devices_) log->step();
}

void SsdTier::on_tick(uint64_t now_ms) {
    if (set_ == nullptr) return;
    set_->on_tick(now_ms);
    for (auto& log : devices_) gone(log->take_lost(kLostPerTick));
    for (auto& [name, tenant] : tenants_) {
        tenant.resting = false;
        // A limit that was lowered.
        if (auto most = tenant.pool->limits().ssd_max) trim(tenant, *most, kTrimMax);
        clean(tenant);
    }
}

uint64_t SsdTier::bytes_of(const Pool& pool) const {
    uint64_t bytes = 0;
    for (const auto& log : devices_) bytes += log->bytes_of(tenant_of(pool).owner);
    return bytes;
}

// Removes the oldest of the tenant's objects, first of the directory that has the most of them; at the node's
// stop nothing that was written for it. False: it still has more.
bool SsdTier::trim(Tenant& tenant, uint64_t bytes_max, uint32_t most) {
    uint64_t all = bytes_of(*tenant.pool);
    if (all <= bytes_max) return true;
    std::vector<std::pair<uint64_t, ssd::Log*>> fullest;
    for (auto& log : devices_) fullest.emplace_back(log->bytes_of(tenant.owner), log.get());
    std::ranges::sort(fullest, std::greater{});
    for (auto [here, log] : fullest) {
        uint64_t left = here - std::min(here, all - bytes_max);
        tenant.dropped_total += log->trim(tenant.owner, left, most, before_flush_);
        all = bytes_of(*tenant.pool);
        if (all <= bytes_max) return true;
    }
    return false;
}

// For a record of an object of that size, within the tenant's limit. At the node's stop the objects that were
// used last come first, so that only records from before it go for others.
bool SsdTier::make_room(Tenant& tenant, uint64_t bytes) {
    std::optional<uint64_t> most = tenant.pool->limits().ssd_max;
    if (!most) return true;
    uint64_t needed = bytes + kRecordBesides + tenant.writing_bytes;
    if (needed > *most) return false;
    // At a stop each object has one turn only.
    return trim(tenant, *most - needed, flushing_ ? UINT32_MAX : kTrimMax);
}

// What the tenant's limit never has room for is not queued: clean() may not look at it for a long time.
void SsdTier::queue(Tenant& tenant, uint32_t slot) {
    const ObjectTable& table = tenant.pool->table();
    if (exceeds_limit(tenant, table.entry(slot).size)) {
        ++not_saved_total_;
        return;
    }
    tenant.dirty.push_back({slot, table.generation(slot), table.last_used(slot)});
    if (tenant.dirty.size() > 2 * table.counters().objects + kDeadMax) drop_dead(tenant);
}

// While little of the arena is to be clean, or the disks take nothing, objects may go faster than clean()
// comes to their entries. Leaves one of each object at most, so that the next time is as many puts away.
void SsdTier::drop_dead(Tenant& tenant) {
    const ObjectTable& table = tenant.pool->table();
    std::unordered_set<uint32_t> seen;
    std::erase_if(tenant.dirty, [&](const Dirty& each) {
        bool dead = !table.committed(each.slot) || table.generation(each.slot) != each.generation;
        return dead || table.saved(each.slot) || table.retained(each.slot) || !seen.insert(each.slot).second;
    });
}

bool SsdTier::exceeds_limit(const Tenant& tenant, uint64_t bytes) {
    std::optional<uint64_t> most = tenant.pool->limits().ssd_max;
    return most && bytes + kRecordBesides > *most;
}

bool SsdTier::wants_cleaning(const Tenant& tenant) const {
    if (tenant.dirty.empty()) return false;
    if (flushing_) return true;
    const Pool& pool = *tenant.pool;
    uint64_t clean = pool.free_bytes() + pool.table().counters().saved_bytes + tenant.writing_bytes;
    // Never more than half of the disks: what is written must not drive out what was just written.
    // Promoted objects come from the disks and count as saved, but were just asked for: they raise the
    // target, so that colder objects are still written behind them.
    double share = options_.clean_share * static_cast<double>(pool.capacity());
    double wanted = std::min(share + static_cast<double>(tenant.promoted_bytes),
                             static_cast<double>(bytes_) / 2 / static_cast<double>(tenants_.size()));
    if (auto most = pool.limits().ssd_max) wanted = std::min(wanted, static_cast<double>(*most) / 2);
    return static_cast<double>(clean) < wanted;
}

void SsdTier::clean(Tenant& tenant) {
    if (paused_) return;
    int looks = 0;
    for (; looks < kLooksMax && wants_cleaning(tenant); ++looks) {
        bool room = writing_ < kWritesMax && (writing_bytes_ < kWriteBytesMax || writing_ == 0);
        if (!room || !write_next(tenant)) break;
    }
    // All that was looked at is in use or pinned: the next tick tries again, rather than each commit.
    tenant.resting = looks == kLooksMax;
    if (tenant.dirty.empty())
        tenant.promoted_bytes = 0;  // nothing is colder than they are but what is written
    if (flushing_) end_flush();
}

// False when no more can be written now.
bool SsdTier::write_next(Tenant& tenant) {
    Dirty next = tenant.dirty.front();
    ObjectTable& table = tenant.pool->table();
    tenant.dirty.pop_front();
    // The queue is not searched when an object goes; its entry is recognised here by the generation.
    bool dead = !table.committed(next.slot) || table.generation(next.slot) != next.generation;
    if (dead || table.saved(next.slot) || table.retained(next.slot)) return true;
    uint64_t used = table.last_used(next.slot);
    if (!flushing_ && (table.pins(next.slot) != 0 || used != next.last_used)) {
        tenant.dirty.push_back({next.slot, next.generation, used});
        return true;
    }
    const IndexEntry& entry = table.entry(next.slot);
    Hash128 hash{entry.hash_low, entry.hash_high};
    size_t device = home(hash);
    if (device == devices_.size()) {
        tenant.dirty.push_front(next);
        if (flushing_) tenant.dirty.clear();  // there is no place for it
        return false;
    }
    if (entry.size > devices_[device]->object_bytes_max()) {
        // Too large for a segment of the log: it stays in memory only, and is not queued again.
        ++not_saved_total_;
        return true;
    }
    uint64_t bytes = entry.size;
    bool never_fits = exceeds_limit(tenant, bytes);
    if (never_fits || !make_room(tenant, bytes)) {
        if (never_fits || (flushing_ && tenant.writing_bytes == 0)) {
            ++not_saved_total_;
            return true;
        }
        tenant.dirty.push_front(next);  // what is being written now has its place first
        return false;
    }
    std::span<const std::byte> data(tenant.pool->data() + entry.offset, bytes);
    auto done = [this, &tenant, device, next, hash, bytes](ssd::Outcome outcome) {
        post_([this, &tenant, device, next, hash, bytes, outcome] {
            written(tenant, device, next.slot, next.generation, hash, bytes, outcome);
        });
    };
    ssd::Key k = key(tenant, device, entry.space, hash, table.name(next.slot));
    if (!devices_[device]->write(k, table.parent_name(next.slot), {data}, entry.crc, std::move(done),
                                 table.version(next.slot))) {
        tenant.dirty.push_front(next);
        if (flushing_) {
            ++not_saved_total_;
            tenant.dirty.pop_front();
        }
        return flushing_;
    }
    // From here to written() the bytes stay where they are, whatever becomes of the object.
    table.retain(next.slot);
    written_now_.emplace(std::pair(hash.high, hash.low), device);
    // The rest of its group comes next, so that the ring comes round to all of it at about the same time.
    if (!next.with_mate && table.group_size(next.slot) <= kMatesMax) {
        for (uint32_t member : table.group_members(next.slot)) {
            if (table.saved(member) || table.retained(member) || table.pins(member) != 0) continue;
            tenant.dirty.push_front({member, table.generation(member), table.last_used(member), true});
        }
    }
    ++writing_;
    writing_bytes_ += bytes;
    tenant.writing_bytes += bytes;
    return true;
}

void SsdTier::written(Tenant& tenant, size_t device, uint32_t slot, uint64_t generation, const Hash128& hash,
                      uint64_t bytes, ssd::Outcome outcome) {
    --writing_;
    writing_bytes_ -= bytes;
    tenant.writing_bytes -= bytes;
    auto [begin, end] = written_now_.equal_range({hash.high, hash.low});
    written_now_.erase(std::find_if(begin, end, [&](const auto& row) { return row.second == device; }));
    ObjectTable& table = tenant.pool->table();
    // kDone alone does not do: a removal may have come between the log's end of the write and this post.
    bool there = outcome == ssd::Outcome::kDone && devices_[device]->has(hash);
    if (there) tell(hash, true);
    if (table.committed(slot) && table.generation(slot) == generation) {
        if (there) {
            table.set_saved(slot, true);
        } else if (!flushing_) {
            tenant.dirty.push_back({slot, generation, table.last_used(slot)});
        } else {
            ++not_saved_total_;
        }
    }
    // May free the memory of an object that was evicted while it was written.
    table.release(slot, generation);
    for (auto& [name, other] : tenants_) clean(other);
}

// An object is evicted with its group while it is written, or a new one of the key has come: nothing of the
// one before may arrive. Its bytes would be the key's again once the new object is evicted.
void SsdTier::cancel_write(const Hash128& hash) {
    auto [begin, end] = written_now_.equal_range({hash.high, hash.low});
    for (auto it = begin; it != end; ++it) {
        // It has arrived a moment ago, and an inventory may have told of it.
        if (devices_[it->second]->has(hash)) tell(hash, false);
        devices_[it->second]->remove(hash);
    }
}

// At the node's stop. Recent use and pins no longer matter, and what fails is not tried again, so that the
// flush ends.
void SsdTier::flush(std::function<void()> done) {
    if (set_ == nullptr) return done();
    if (!flushing_) before_flush_ = sequence_->load();
    flushing_ = true;
    flushed_.push_back(std::move(done));
    for (auto& [name, tenant] : tenants_) {
        // What was used last is worth most, should the time or the tenant's limit not suffice.
        for (Dirty& each : tenant.dirty) each.last_used = tenant.pool->table().last_used(each.slot);
        std::ranges::stable_sort(tenant.dirty, std::greater{}, &Dirty::last_used);
        leave_old_ones(tenant);
        clean(tenant);
    }
    end_flush();
}

// An object is not written at the cost of one that was used later and is on the disks already.
void SsdTier::leave_old_ones(Tenant& tenant) {
    std::optional<uint64_t> most = tenant.pool->limits().ssd_max;
    if (!most) return;
    const ObjectTable& table = tenant.pool->table();
    std::vector<std::pair<uint64_t, uint64_t>> objects;  // when each was used, and bytes
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        if (table.committed(slot)) objects.emplace_back(table.last_used(slot), table.entry(slot).size);
    }
    std::ranges::sort(objects, std::greater{});
    uint64_t all = 0;
    for (const auto& [used, bytes] : objects) {
        all += bytes + kRecordBesides;
        if (all <= *most) continue;
        size_t before = tenant.dirty.size();
        std::erase_if(tenant.dirty, [used](const Dirty& each) { return each.last_used <= used; });
        not_saved_total_ += before - tenant.dirty.size();
        return;
    }
}

void SsdTier::end_flush() {
    if (writing_ != 0 || set_ == nullptr) return;
    for (auto& [name, tenant] : tenants_) {
        if (!tenant.dirty.empty()) return;
    }
    if (flushed_.empty()) return;
    // The last: it vouches for removals that are written by then.
    set_->save([this, flushed = std::exchange(flushed_, {})] {
        post_([flushed] {
            for (const auto& done : flushed) done();
        });
    });
}

// The ring came round to them, or they were damaged.
void SsdTier::gone(const std::vector<Hash128>& hashes) {
    for (const Hash128& hash : hashes) {
        if (is_written(hash)) continue;  // by another one
        tell(hash, false);
        for (auto& [name, tenant] : tenants_) {
            ObjectTable& table = tenant.pool->table();
            uint32_t slot = table.find(hash);
            if (slot == kNoSlot || !table.saved(slot)) continue;
            table.set_saved(slot, false);
            queue(tenant, slot);
        }
    }
}

}  // namespace moonpool
