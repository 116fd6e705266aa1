// SsdTier, what the disks have: which directory, what is found, removed and listed.
//
// For one key at most one device has a record that is visible, and its bytes are those of the object in
// memory where there is one (saved). Three rules keep it so: a commit cancels writes of the key that are
// under way (cancel_write), a replacement forgets it on all devices (forget), and what a promotion has read
// counts only if the record is still the one it looked up (sequence).
#include "store/node/ssd_tier.hpp"

#include <algorithm>

namespace moonpool {

namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kReadsMax = 65536;  // that wait in one log
constexpr uint32_t kCursorBits = 28;   // of a list: the device stands above

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
