// SimNode: its disk, and what a start must find there.
#include <algorithm>
#include <stdexcept>

#include "node.hpp"

namespace moonpool::sim {

namespace {

constexpr Micros kTick = 100 * kMs, kFlushAtMost = kSecond;
// Small, so that the log comes round: a record takes a block, a segment has room for nine.
constexpr uint64_t kSegmentBytes = 48 << 10, kSegments = 10;

std::pair<uint64_t, uint64_t> key_of(const Hash128& hash) { return {hash.high, hash.low}; }

}  // namespace

void SimNode::open_disk() {
    SsdOptions options;
    options.directories = {{"disk", ssd::kSegmentsBegin + kSegments * kSegmentBytes}};
    options.segment_bytes = kSegmentBytes;
    options.ranges = ranges_;
    options.open = disk_.opener();
    auto on_sync = [this]() -> std::function<void()> {
        if (ssd_ == nullptr) return {};
        return [this, written = on_disk()] { synced_ = written; };
    };
    options.stepping =
        ssd::Stepping{[this, on_sync] { return disk_.queue([this] { step_disk(); }, on_sync); },
                      [this] { return now_ms(); }};
    synced_.clear();
    step_is_due_ = false;
    auto tier = SsdTier::open(options, pools_, [this](std::function<void()> f) { later(1, std::move(f)); });
    if (!tier) throw std::runtime_error(tier.error().text);
    ssd_ = std::move(*tier);
    compare_disk();
}

// The log's thread runs some time after it was woken.
void SimNode::step_disk() {
    if (std::exchange(step_is_due_, true)) return;
    later(world_.random.between(1, 50), [this] {
        step_is_due_ = false;
        ssd_->step();
    });
}

void SimNode::tick() {
    store_pool().table().on_time(now_ms());
    ssd_->on_tick(now_ms());
    ssd_->step();
    later(kTick, [this] { tick(); });
}

SimNode::OnDisk SimNode::on_disk() const {
    OnDisk all;
    std::vector<Hash128> hashes;
    for (uint32_t cursor = ssd_->hashes(0, 0, UINT32_MAX, hashes); cursor != 0;)
        cursor = ssd_->hashes(0, cursor, UINT32_MAX, hashes);
    for (const Hash128& hash : hashes) {
        if (auto rank = ssd_->rank(0, hash)) all.emplace(key_of(hash), *rank);
    }
    return all;
}

uint64_t SimNode::disk_counter(std::string_view name) const {
    const auto all = ssd_->gauges();
    return std::ranges::find(all, name, [](const auto& row) { return row.first; })->second;
}

// What the next life must find: nothing, where a write has failed, for the other objects of its segment count
// until the restart only.
SimNode::OnDisk SimNode::promised(bool after_power_failure) const {
    if (disk_counter("ssd_write_errors_total") != 0) return {};
    OnDisk all = on_disk();
    if (!after_power_failure) return all;
    std::erase_if(all, [this](const auto& row) {
        auto synced = synced_.find(row.first);
        return synced == synced_.end() || synced->second != row.second;
    });
    return all;
}

void SimNode::compare_disk() {
    if (!promised_) return;
    const OnDisk now = on_disk(), then = *std::exchange(promised_, std::nullopt);
    // Else there were so many starts in a row that no segment was free, or a record could not be read.
    const bool has_all = disk_counter("ssd_evicted_total") == 0 && disk_counter("ssd_read_errors_total") == 0;
    if (disk_.failed_at_open() || !has_all) return;
    for (const auto& [hash, rank] : then) {
        auto found = now.find(hash);
        if (found != now.end() && found->second >= rank) continue;
        findings_.push_back({Finding::kBooks, name() + "'s disk has lost what was written to it", {}});
        return;
    }
}

void SimNode::shut_down(std::function<void()> then) {
    shutting_down_ = true;
    callers_.clear();
    for (Agent& agent : agents_) {
        ++agent.dials;
        agent.link.reset();
    }
    auto ends = std::make_shared<std::function<void()>>(std::move(then));
    auto end = [this, ends] {
        if (*ends) world_.at(world_.now(), nullptr, std::exchange(*ends, {}));
    };
    if (ssd_ == nullptr) return end();
    ssd_->flush([this, end] {
        compare_memory();
        end();
    });
    later(kFlushAtMost, end);
}

// At a clean stop, when all is written.
void SimNode::compare_memory() {
    if (disk_counter("ssd_write_errors_total") != 0) return;
    const ObjectTable& table = store_pool().table();
    const OnDisk written = on_disk();
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        const IndexEntry& entry = table.entry(slot);
        if (!table.committed(slot) || written.contains({entry.hash_high, entry.hash_low})) continue;
        findings_.push_back({Finding::kBooks, name() + " stopped, and its disk lacks what memory had", {}});
        return;
    }
}

}  // namespace moonpool::sim
