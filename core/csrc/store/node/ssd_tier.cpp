// Per tenant there is a queue `dirty` of objects that no disk has, oldest first as far as it is known: an
// object that was used since it was queued goes to the back when its turn comes. clean() writes from its
// front until enough of the arena is clean, which means free, saved, or being written.
//
// For one key at most one device has a record that is visible, and its bytes are those of the object in
// memory where there is one (saved). Three rules keep it so: a commit cancels writes of the key that are
// under way (cancel_write), a replacement forgets it on all devices (forget), and what a promotion has read
// counts only if the record is still the one it looked up (sequence).
//
// Memory that is being read from a disk belongs to a lease without a connection (Promotion::lease); its end
// frees what was not committed.
#include "store/node/ssd_tier.hpp"

#include <algorithm>
#include <unordered_set>

namespace moonpool {

namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kWritesMax = 64;               // objects that are held while they are written,
constexpr uint64_t kWriteBytesMax = 64ull << 20;  // and their bytes, unless it is one
constexpr size_t kMatesMax = 64;                  // of a group that is written in one go
constexpr uint32_t kTrimMax = 1024;               // objects that go in one go, for a tenant's limit
constexpr uint64_t kRecordBesides = 8u << 10;     // of a record, beside its object: header and rounding
constexpr uint64_t kDeadMax = 1024;               // entries of a queue, beside two for each object
constexpr int kLooksMax = 1024;                   // at objects that may be written, in one go
constexpr uint32_t kLostPerTick = 65536;          // entries of a directory that is given up
constexpr uint32_t kReadsMax = 65536;             // that wait in one log
constexpr uint32_t kCursorBits = 28;              // of a list: the device stands above

}  // namespace

Result<std::unique_ptr<SsdTier>> SsdTier::open(const SsdOptions& options, Pools& pools, Post post) {
    if (options.directories.size() > kSsdDirectoriesMax) {
        return Error{Code::kInvalidArgument, "a node takes at most " + std::to_string(kSsdDirectoriesMax) +
                                                 " SSD directories (node.ssd)"};
    }
    std::unique_ptr<SsdTier> tier(new SsdTier(options, std::move(post)));
    Result<Logs> logs = tier->open_logs();
    if (!logs) return logs.error();
    tier->take(std::move(*logs));
    // Before any client: a key that stands on two disks would be answered from whichever comes first.
    tier->keep_newest();
    for (auto& [name, pool] : pools) {
        Tenant& tenant = tier->tenants_[name];
        tenant.pool = pool.get();
        tenant.owner = pool->owner();
        tenant.spaces.resize(tier->devices_.size());
        tier->compare_memory(tenant);
        // Though memory may not have the old object: a disk may.
        pool->set_on_space_closed(
            [t = tier.get(), &tenant](uint32_t space) { t->leave_space(tenant, space); });
        pool->table().set_on_replace([t = tier.get()](const Hash128& hash) { t->forget(hash); });
        // It must not arrive later: while neither memory nor a disk had it, a removal was not told to this
        // node.
        pool->table().set_on_evict_unwritten(
            [t = tier.get()](const Hash128& hash) { t->cancel_write(hash); });
        pool->table().set_on_commit([t = tier.get(), &tenant](uint32_t slot) {
            const ObjectTable& table = tenant.pool->table();
            const IndexEntry& entry = table.entry(slot);
            Hash128 hash{entry.hash_low, entry.hash_high};
            // Its record counts: it is not written anew, and what ends as its write is not cancelled.
            if (t->promoting_) return;
            if (t->writing_ != 0) t->cancel_write(hash);
            if (t->set_ != nullptr) t->set_->note(hash);
            t->queue(tenant, slot);
            // While writes are under way, their ends call clean(); so a burst of puts does not run it for
            // each.
            if (t->writing_ == 0 && !tenant.resting) t->clean(tenant);
        });
    }
    return tier;
}

Result<SsdTier::Logs> SsdTier::open_logs() {
    Logs logs;
    // One counter for all logs: of two records of one key on two disks the higher sequence is the newer.
    logs.sequence = std::make_shared<std::atomic<uint64_t>>(0);
    for (const auto& [directory, bytes] : options_.directories) {
        ssd::LogOptions log_options;
        log_options.directory = directory;
        log_options.bytes = bytes;
        log_options.segment_bytes = options_.segment_bytes;
        log_options.depth = options_.depth;
        log_options.io = options_.io;
        log_options.records_max = options_.records_max;
        log_options.queue_max = kReadsMax;
        log_options.sequence = logs.sequence;
        log_options.open = options_.open;
        log_options.stepping = options_.stepping;
        log_options.on_gone = [this](const std::vector<Hash128>& hashes) {
            // On a log's thread: everything here is the loop's.
            post_([this, hashes] { gone(hashes); });
        };
        Result<std::unique_ptr<ssd::Log>> log = ssd::Log::open(std::move(log_options));
        if (!log) return log.error();
        logs.devices.push_back(std::move(*log));
        logs.bytes += bytes;
    }
    std::vector<ssd::Log*> of_set;
    for (auto& log : logs.devices) of_set.push_back(log.get());
    Result<std::unique_ptr<ssd::LogSet>> set =
        ssd::LogSet::open(std::move(of_set), logs.sequence, options_.ranges);
    if (!set) return set.error();
    logs.set = std::move(*set);
    return logs;
}

void SsdTier::take(Logs logs) {
    set_.reset();
    devices_ = std::move(logs.devices);
    set_ = std::move(logs.set);
    sequence_ = std::move(logs.sequence);
    bytes_ = logs.bytes;
}

// Of what is in memory already, as another process had it: what a disk has with the same bytes is saved; what
// it has with others must not come back; the rest is queued, coldest first.
void SsdTier::compare_memory(Tenant& tenant) {
    ObjectTable& table = tenant.pool->table();
    std::vector<uint32_t> slots;
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        if (table.committed(slot)) slots.push_back(slot);
    }
    std::ranges::sort(slots, {}, [&](uint32_t slot) { return table.last_used(slot); });
    tenant.dirty.clear();
    for (uint32_t slot : slots) {
        const IndexEntry& entry = table.entry(slot);
        const Hash128 hash{entry.hash_low, entry.hash_high};
        bool saved = false;
        for (size_t i = 0; i < devices_.size(); ++i) {
            std::optional<ssd::Found> found =
                devices_[i]->find(key(tenant, i, entry.space, hash, table.name(slot)));
            if (!found) continue;
            saved = found->size == entry.size && found->crc == entry.crc;
            if (!saved) devices_[i]->remove(hash);
        }
        table.set_saved(slot, saved);
        if (!saved) queue(tenant, slot);
    }
}

void SsdTier::resume() {
    paused_ = false;
    for (auto& [name, tenant] : tenants_) clean(tenant);
}

void SsdTier::save(std::function<void()> done) {
    if (set_ == nullptr) return done();
    set_->save(std::move(done));
}

void SsdTier::close_logs() {
    close();
    take({});
}

void SsdTier::reopen(Logs logs) {
    take(std::move(logs));
    keep_newest();
    for (auto& [name, tenant] : tenants_) {
        tenant.spaces.assign(devices_.size(), {});
        compare_memory(tenant);
    }
}

SsdTier::~SsdTier() {
    close();
    for (auto& [name, tenant] : tenants_) {
        tenant.pool->table().set_on_replace({});
        tenant.pool->table().set_on_commit({});
        tenant.pool->table().set_on_evict_unwritten({});
        tenant.pool->set_on_space_closed({});
    }
}

void SsdTier::close() {
    for (auto& log : devices_) log->close();
}

// A key may stand in two directories when one of them was away for a while.
void SsdTier::keep_newest() {
    for (size_t i = 0; i + 1 < devices_.size(); ++i) {
        uint32_t cursor = 0;
        do {
            std::vector<Hash128> hashes;
            cursor = devices_[i]->hashes(cursor, UINT32_MAX, hashes);
            for (const Hash128& hash : hashes) {
                for (size_t j = i + 1; j < devices_.size(); ++j) {
                    std::optional<ssd::Log::Rank> mine = devices_[i]->rank(hash);
                    std::optional<ssd::Log::Rank> other = devices_[j]->rank(hash);
                    if (mine && other) devices_[*mine < *other ? i : j]->remove(hash);
                }
            }
        } while (cursor != 0);
    }
}

// Numbers of spaces differ between the pool and each log. The log is asked once for each, and the number
// kept until the pool's space is closed.
ssd::Key SsdTier::key(Tenant& tenant, size_t device, uint32_t space, const Hash128& hash,
                      std::string_view name) {
    std::vector<uint32_t>& known = tenant.spaces[device];
    if (known.size() <= space) known.resize(space + 1, kNone);
    if (known[space] == kNone) known[space] = devices_[device]->space(tenant.pool->identity(space));
    return ssd::Key{known[space], hash, name};
}

void SsdTier::leave_space(Tenant& tenant, uint32_t space) {
    for (size_t device = 0; device < devices_.size(); ++device) {
        std::vector<uint32_t>& known = tenant.spaces[device];
        if (space >= known.size() || known[space] == kNone) continue;
        devices_[device]->leave_space(known[space]);
        known[space] = kNone;
    }
}

// Where a new object goes: always the same place while that one takes writes.
size_t SsdTier::home(const Hash128& hash) const {
    if (devices_.empty()) return 0;
    size_t first = hash.high % devices_.size();
    for (size_t i = 0; i < devices_.size(); ++i) {
        size_t device = (first + i) % devices_.size();
        if (devices_[device]->accepts_writes()) return device;
    }
    return devices_.size();
}

// Larger than the limit of this run (it was lowered since): there would be no memory for it, so it is a
// miss.
std::optional<ssd::Found> SsdTier::find(Pool& pool, uint32_t space, std::string_view name) {
    Tenant& tenant = tenant_of(pool);
    Hash128 hash = pool.hash(space, name);
    for (size_t i = 0; i < devices_.size(); ++i) {
        std::optional<ssd::Found> found = devices_[i]->find(key(tenant, i, space, hash, name));
        if (found && found->size <= pool.object_bytes_max()) return found;
    }
    return std::nullopt;
}

bool SsdTier::forget(Pool& pool, uint32_t space, std::string_view name) {
    return forget(pool.hash(space, name));
}

bool SsdTier::forget(const Hash128& hash) {
    if (set_ == nullptr) return false;  // another process has the directories
    set_->note(hash);
    bool was_there = false;
    for (auto& log : devices_) {
        // A write that is under way is removed as well, but the directory has not been told of it yet.
        bool visible = log->has(hash);
        log->remove(hash);
        if (visible) tell(hash, false);
        was_there |= visible;
    }
    return was_there;
}

bool SsdTier::forget_older(const Hash128& hash, Version version) {
    if (set_ == nullptr) return false;
    set_->note(hash);
    bool visible = false, stays = false, visible_now = false;
    for (auto& log : devices_) {
        visible |= log->has(hash);
        stays |= log->remove_older(hash, version);
        visible_now |= log->has(hash);
    }
    if (visible && !visible_now) tell(hash, false);
    return stays;
}

void SsdTier::tell_again(const Hash128& hash) {
    if (is_written(hash)) tell(hash, true);
}

bool SsdTier::is_written(const Hash128& hash) const {
    return std::ranges::any_of(devices_, [&](auto& log) { return log->has(hash); });
}

void SsdTier::tell(const Hash128& hash, bool added) {
    if (delta_log_ != nullptr) delta_log_->push(hash, Tier::kSsd, added);
    if (listener_) listener_(hash, added);
}

// A cursor is the device in its upper bits and the log's own cursor below. What memory has, too, is left
// out: the caller lists it from there.
uint32_t SsdTier::list(Pool& pool, uint32_t space, uint32_t cursor, uint32_t scan,
                       std::vector<ssd::Listed>& out) {
    Tenant& tenant = tenant_of(pool);
    size_t device = cursor >> kCursorBits;
    if (device >= devices_.size()) return 0;
    uint32_t at = cursor & ((1u << kCursorBits) - 1);
    std::vector<ssd::Listed> rows;
    uint32_t log_space = key(tenant, device, space, Hash128{}, {}).space;
    at = devices_[device]->list(log_space, at, scan, rows);
    for (ssd::Listed& row : rows) {
        if (pool.find(space, row.name) == kNoSlot) out.push_back(std::move(row));
    }
    if (at == 0) return device + 1 < devices_.size() ? static_cast<uint32_t>(device + 1) << kCursorBits : 0;
    return static_cast<uint32_t>(device) << kCursorBits | at;
}

uint32_t SsdTier::hashes(size_t device, uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const {
    return devices_[device]->hashes(cursor, scan, out);
}

// ---- writing

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

// ---- reading

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

// ---- books

std::vector<std::pair<std::string, uint64_t>> SsdTier::gauges() const {
    std::vector<std::pair<std::string, uint64_t>> rows;
    if (set_ == nullptr) return rows;
    for (const auto& log : devices_) {
        size_t i = 0;
        for (const auto& [name, value] : log->counters()) {
            if (rows.size() <= i) rows.emplace_back(name, 0);
            rows[i++].second += value;
        }
    }
    uint64_t lost = 0, saved = 0, dirty = 0, rings = 0;
    for (const auto& [name, tenant] : tenants_) {
        lost += tenant.pool->table().counters().evicted_unsaved_total;
        saved += tenant.pool->table().counters().saved_bytes;
        dirty += tenant.dirty.size();
    }
    for (const auto& log : devices_) rings += std::string_view(log->io_name()) == "io_uring";
    rows.emplace_back("ssd_directories", devices_.size());
    rows.emplace_back("ssd_directories_away", set_->away());
    rows.emplace_back("ssd_epoch", set_->epoch());
    rows.emplace_back("ssd_void_objects", set_->voided());
    rows.emplace_back("ssd_io_uring", rings);
    rows.emplace_back("ssd_saved_bytes", saved);
    rows.emplace_back("ssd_dirty_objects", dirty);
    rows.emplace_back("ssd_lost_total", lost);
    rows.emplace_back("ssd_not_saved_total", not_saved_total_);
    rows.emplace_back("ssd_promoting", promotions_.size());
    rows.emplace_back("ssd_writing", writing_);
    rows.emplace_back("ssd_promoted_total", promoted_total_);
    rows.emplace_back("ssd_promoted_bytes_total", promoted_bytes_total_);
    rows.emplace_back("ssd_promote_failed_total", promote_failed_total_);
    return rows;
}

std::vector<SsdTier::Device> SsdTier::describe() const {
    std::vector<Device> all;
    for (const auto& log : devices_) {
        all.push_back({log->directory(), log->io_name(), log->io_reason(), log->trouble()});
    }
    return all;
}

bool SsdTier::check_integrity() const {
    return std::all_of(devices_.begin(), devices_.end(), [](auto& log) { return log->check_integrity(); });
}

}  // namespace moonpool
