#include "node.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/crc32c.hpp"
#include "frames.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"
#include "store/shared/stripes.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

namespace {

constexpr size_t kLogRowsMax = 256;  // small, so that it overflows now and then
constexpr uint32_t kObjectsMax = 256;
constexpr size_t kRemovalsPerFrame = 16;
constexpr Micros kTick = 100 * kMs, kFlushAtMost = kSecond;
// Small, so that the log comes round: a record takes a block, a segment has room for nine.
constexpr uint64_t kArenaBytes = 1 << 20, kSegmentBytes = 48 << 10, kSegments = 10;
constexpr uint64_t kMemoryLeft = 128 << 10;  // of an arena above a disk: little, so that all of it is written

std::pair<uint64_t, uint64_t> key_of(const Hash128& hash) { return {hash.high, hash.low}; }

}  // namespace

SimNode::SimNode(World& world, Network& network, const std::vector<SimMaster*>& masters, uint32_t host,
                 const NodeOptions& options, const Planted& planted)
    : Process(world, "node-" + std::to_string(host), host),
      network_(network),
      options_(options),
      ranges_(masters.front()->range().count),
      planted_(planted),
      disk_(world, options.disk, planted) {
    for (SimMaster* master : masters) agents_.emplace_back(master);
    identity_.name = "node";
    identity_.host_id = "host-" + std::to_string(host);
    identity_.address = "10.0.0." + std::to_string(host) + ":7700";
}

// In the order of Server.
void SimNode::on_start() {
    shutting_down_ = false;
    identity_.incarnation.fill(0);
    uint64_t life = this->life();
    identity_.incarnation[0] = static_cast<uint8_t>(host() + 1);
    std::memcpy(identity_.incarnation.data() + 1, &life, sizeof(life));
    make_pool();
    if (options_.has_disk) open_disk();
    removals_ = std::make_unique<Removals>(ranges_);
    if (ssd_ != nullptr) {
        removals_->set_on_applied(
            [this](uint32_t range, Version version) { ssd_->set_applied(range, version); });
        for (uint32_t range = 0; range < ranges_; ++range)
            removals_->set_applied(range, ssd_->applied(range));
    }
    DeltaLog* next = nullptr;
    for (size_t i = agents_.size(); i-- > 0;) {
        agents_[i].log = std::make_unique<DeltaLog>(
            kLogRowsMax, [this, i] { later(1, [this, i] { turn(agents_[i]); }); }, next,
            agents_[i].master->range());
        next = agents_[i].log.get();
    }
    store_pool().table().set_delta_log(next);
    if (ssd_ != nullptr) ssd_->set_delta_log(next);
    holdings_ = std::make_unique<Holdings>(pools_, ssd_.get(), *removals_);
    for (Agent& agent : agents_) {
        agent.protocol = std::make_unique<MemberProtocol>(MemberProtocolOptions{.identity = identity_},
                                                          hooks(agent.master->range()), *agent.log, counters_,
                                                          [this] { return now_ms(); });
        agent.backoff_ms = 50;
        dial_master(agent);
    }
    if (ssd_ != nullptr) tick();
}

void SimNode::make_pool() {
    PoolOptions options;
    options.arena_bytes = kArenaBytes;
    options.objects_max = options_.memory_objects == 0 ? kObjectsMax : options_.memory_objects;
    auto pool = Pool::create(options, identity_.incarnation);
    if (!pool) throw std::runtime_error(pool.error().text);
    while (*(*pool)->commit_memory() != 0) (*pool)->open_memory();
    space_ = *(*pool)->open_space("default", "", 8);
    // As if a client had the rest in use.
    if (options_.has_disk) (void)(*pool)->lease(kArenaBytes - kMemoryLeft, kArenaBytes - kMemoryLeft);
    pools_["default"] = std::move(*pool);
}

// ---- The disk

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
    // Else there were so many starts in a row that no segment was free.
    const bool has_all = disk_counter("ssd_evicted_total") == 0;
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

MemberHooks SimNode::hooks(const Range& range) {
    return {[this, range](uint64_t& cursor, std::vector<DeltaRow>& rows) {
                cursor = holdings_->inventory(cursor, rows, range);
                return true;
            },
            [this](NodeLoad& load) {
                load = holdings_->load(now_ms());
                return true;
            },
            [this, range](const Drops& drops) { return drop(drops, range); },
            [this, range] { return removals_->applied(range.index); },
            [this] { return holdings_->empty(); },
            [this, range](Version before, Version& cursor, std::vector<Drop>& rows) {
                if (planted_.handover_lost) return kNoVersion;
                return removals_->before(range.index, before, cursor, kRemovalsPerFrame, rows);
            },
            [this] { return ssd_ != nullptr; }};
}

void SimNode::on_end() {
    lost_manifests_.merge(manifests());
    disk_has_lost_ = disk_has_lost();
    callers_.clear();
    for (Agent& agent : agents_) {
        agent.link.reset();
        agent.protocol.reset();
    }
    holdings_.reset();
    const bool power_failed = std::exchange(power_fails_, false);
    if (ssd_ != nullptr) {
        // A flush has ended, or had its time: then the log closes as in production.
        if (std::exchange(shutting_down_, false)) ssd_->close();
        promised_ = promised(power_failed && options_.disk.torn);
        disk_.cut_off(power_failed);
        ssd_.reset();
    }
    removals_.reset();
    pools_.clear();
    for (Agent& agent : agents_) agent.log.reset();
}

// ---- The agents

void SimNode::dial_master(Agent& agent) {
    if (shutting_down_) return;
    uint64_t dial = ++agent.dials;
    network_.dial(
        *this, *agent.master,
        [master = agent.master](std::shared_ptr<End> end) {
            return master->accept(std::move(end), moonpool::Caller::kNode);
        },
        [this, &agent, dial](std::shared_ptr<End> end) {
            if (dial != agent.dials) {  // it took too long, and another attempt is under way
                if (end != nullptr) end->close();
            } else if (end != nullptr) {
                on_link(agent, std::move(end));
            } else {
                link_failed(agent);
            }
        });
    later(kSecond, [this, &agent, dial] {
        if (dial == agent.dials && agent.link == nullptr) link_failed(agent);
    });
}

void SimNode::on_link(Agent& agent, std::shared_ptr<End> end) {
    agent.link = end;
    auto mine = [&agent, raw = end.get()] { return agent.link.get() == raw; };
    end->on_frame = [this, &agent, mine](const Bytes& frame) {
        if (!mine()) return;
        if (!agent.protocol->on_frame(header_of(frame), body_of(frame))) return link_failed(agent);
        if (agent.protocol->told()) agent.backoff_ms = 50;
        turn(agent);
    };
    end->on_end = [this, &agent, mine] {
        if (mine()) link_failed(agent);
    };
    Status sent =
        agent.protocol->connected("master", [this, &agent](std::span<const std::byte> frame) -> Status {
            Bytes bytes(frame.begin(), frame.end());
            bool changes = header_of(bytes).kind == Kind::kDelta &&
                           (body_of(bytes).number<uint32_t>() & ~kDeltaApplied) == 0;
            if (!changes || !planted_.rows_lost) agent.link->send(std::move(bytes));
            return success();
        });
    if (!sent) return link_failed(agent);
    turn(agent);
}

void SimNode::turn(Agent& agent) {
    if (agent.link == nullptr) return;
    if (!agent.protocol->step()) return link_failed(agent);
    uint64_t turn = ++agent.turns, now = now_ms(), due = std::max(agent.protocol->due_ms(), now);
    later((due - now) * kMs + 100, [this, &agent, turn] {
        if (turn == agent.turns) this->turn(agent);
    });
}

void SimNode::link_failed(Agent& agent) {
    if (agent.link != nullptr) agent.link->close();
    agent.link.reset();
    agent.protocol->disconnected();
    uint64_t dial = ++agent.dials;
    later(static_cast<Micros>(agent.backoff_ms) * kMs, [this, &agent, dial] {
        if (dial == agent.dials) dial_master(agent);
    });
    agent.backoff_ms = std::min(agent.backoff_ms * 2, 500);
}

void SimNode::break_master_link() {
    for (Agent& agent : agents_) {
        if (agent.link != nullptr) link_failed(agent);
    }
}

bool SimNode::in_pool(const SimMaster& master) const {
    return std::ranges::any_of(agents_, [&](const Agent& agent) {
        return agent.master == &master && agent.link != nullptr && agent.protocol != nullptr &&
               agent.protocol->told();
    });
}

void SimNode::add_contents(Contents& all) const {
    const ObjectTable& table = pool()->table();
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        if (!table.committed(slot)) continue;
        std::string name(table.name(slot));
        all[name].insert(*read(name));
    }
    if (ssd_ == nullptr) return;
    for (const auto& [name, bytes] : stored_) {
        auto found = on_disk_alone(name);
        if (found && found->crc == crc32c(0, bytes.data(), bytes.size())) all[name].insert(bytes);
    }
}

bool SimNode::disk_has_lost() const {
    if (ssd_ == nullptr) return disk_has_lost_;
    return disk_has_lost_ || disk_counter("ssd_evicted_total") != 0 ||
           disk_counter("ssd_write_errors_total") != 0;
}

std::set<std::string> SimNode::manifests() const {
    Contents all;
    add_contents(all);
    std::set<std::string> groups;
    for (const auto& [name, copies] : all) {
        for (const std::string& bytes : copies) {
            auto manifest = decode_manifest(std::as_bytes(std::span(bytes)), cluster_secrets(), name);
            if (manifest) groups.insert(manifest->group_name());
        }
    }
    return groups;
}

bool SimNode::drop(const Drops& drops, const Range& range) {
    std::set<std::string> before = manifests();
    if (!planted_.drop_lost) {
        if (drops.all) drop_all_of_disk(drops.all_before, range);
        uint32_t cursor = 0;
        do {
            if (drops.all) cursor = holdings_->drop_some(store_pool(), cursor, drops.all_before, range);
        } while (cursor != 0);
        if (drops.all) drop_all_of_disk(drops.all_before, range);
        for (const Drop& drop : drops.items) holdings_->drop(drop);
    }
    removals_->set_applied(range.index, drops.upto);
    if (!before.empty()) {
        std::set<std::string> after = manifests();
        for (const std::string& group : before) {
            if (!after.contains(group)) lost_manifests_.insert(group);
        }
    }
    return true;
}

void SimNode::drop_all_of_disk(Version before, const Range& range) {
    if (ssd_ == nullptr) return;
    for (uint32_t cursor = holdings_->drop_some_of_disk(0, 0, before, range); cursor != 0;)
        cursor = holdings_->drop_some_of_disk(0, cursor, before, range);
}

uint64_t SimNode::objects(const Range& range) const {
    const ObjectTable& table = pool()->table();
    uint64_t n = 0;
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        const IndexEntry& entry = table.entry(slot);
        n += table.committed(slot) && range.contains({entry.hash_low, entry.hash_high});
    }
    return n;
}

uint64_t SimNode::objects_on_disk(const Range& range) const {
    if (ssd_ == nullptr) return 0;
    uint64_t n = 0;
    for (const auto& [hash, rank] : on_disk()) n += range.contains({hash.second, hash.first});
    return n;
}

// ---- The store: as Connection, without its socket.

bool SimNode::accept(std::shared_ptr<End> end) {
    if (shutting_down_) return false;
    uint64_t id = next_caller_++;
    end->on_frame = [this, id](const Bytes& frame) { on_frame(id, frame); };
    end->on_end = [this, id] { drop_caller(id); };
    callers_.emplace(id, Caller{std::move(end), {}});
    return true;
}

void SimNode::drop_caller(uint64_t id) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
    for (auto& [pin, pinned] : it->second.pins) unpin(pinned);
    callers_.erase(it);
}

void SimNode::unpin(const std::vector<Pinned>& pinned) {
    for (const Pinned& what : pinned) store_pool().table().unpin(what.slot, what.generation);
}

// The answers of a connection keep their order.
void SimNode::on_frame(uint64_t id, const Bytes& frame) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
    if (it->second.waits) return it->second.behind.push_back(frame);
    handle(id, frame, false);
}

std::optional<ssd::Found> SimNode::on_disk_alone(std::string_view name) const {
    if (ssd_ == nullptr || pool()->find(space_, name) != kNoSlot) return std::nullopt;
    return ssd_->find(*pools_.begin()->second, space_, name);
}

// What memory must have first; of the names of such a frame one at most.
std::optional<std::string> SimNode::waits_for(const Bytes& frame) const {
    FrameHeader header = header_of(frame);
    Reader body = body_of(frame);
    std::vector<std::string> names;
    if (header.kind == Kind::kRead) {
        body.number<uint32_t>();
        if (body.number<uint32_t>() != 1) throw std::runtime_error("a READ of several keys");
        ReadAsk ask = ReadAsk::read(body);
        if (!ask.pinned() && on_disk_alone(ask.name)) names.emplace_back(ask.name);
    } else if (header.kind == Kind::kLookup) {
        LookupHead head = LookupHead::read(body);
        for (uint32_t i = 0; head.pins() && i < head.names; ++i) {
            std::string name(body.bytes16());
            if (on_disk_alone(name)) names.push_back(name);
        }
    } else if (header.kind == Kind::kRemove) {
        body.number<uint32_t>();
        auto n = body.number<uint32_t>();
        const bool ordered = (n & kRemoveVersions) != 0;
        for (uint32_t i = 0; i < (n & ~kRemoveVersions); ++i) {
            std::string name(body.bytes16());
            auto found = on_disk_alone(name);
            if (found && found->size == kManifestBytes) names.push_back(name);
        }
        if (!ordered && body.left() != 0) return std::nullopt;  // one generation
    }
    if (names.size() > 1) throw std::runtime_error("a frame that waits for several objects");
    return names.empty() ? std::nullopt : std::optional(names.front());
}

// As Connection::park: the frame is handled anew when memory has what it waits for. False: it waits for
// nothing, or for what cannot be had from the disk.
bool SimNode::park(uint64_t id, const Bytes& frame) {
    std::optional<std::string> name = waits_for(frame);
    if (!name) return false;
    auto arrived = [this, id, frame](uint32_t) {
        auto it = callers_.find(id);
        if (it == callers_.end()) return;
        it->second.waits = false;
        handle(id, frame, true);
        while ((it = callers_.find(id)) != callers_.end() && !it->second.waits &&
               !it->second.behind.empty()) {
            Bytes next = std::move(it->second.behind.front());
            it->second.behind.pop_front();
            handle(id, next, false);
        }
    };
    callers_.find(id)->second.waits = ssd_->promote(store_pool(), space_, *name, arrived);
    return callers_.find(id)->second.waits;
}

void SimNode::handle(uint64_t id, const Bytes& frame, bool resumed) {
    if (!resumed && park(id, frame)) return;
    auto it = callers_.find(id);
    FrameHeader header = header_of(frame);
    Reader body = body_of(frame);
    Bytes out;
    size_t at = begin_frame(out, header.kind, kFlagAnswer, header.request_id);
    switch (header.kind) {
        case Kind::kPut:
            on_put(header, body, out);
            break;
        case Kind::kRead:
            on_read(header, body, out);
            break;
        case Kind::kLookup:
            on_lookup(it->second, header, body, out);
            break;
        case Kind::kRemove:
            on_remove(header, body, out);
            break;
        case Kind::kRelease: {
            auto pin = it->second.pins.find(body.number<uint64_t>());
            if (pin != it->second.pins.end()) {
                if (!planted_.unpin_lost) unpin(pin->second);
                it->second.pins.erase(pin);
            }
            return;
        }
        default:
            throw std::runtime_error("a frame that no simulated client sends");
    }
    finish_frame(out, at);
    it->second.end->send(std::move(out));
}

void SimNode::on_put(const FrameHeader&, Reader body, Bytes& out) {
    PutHead head = PutHead::read(body);
    std::vector<PutObject> rows;
    for (uint32_t i = 0; i < head.commit.rows; ++i) rows.push_back(PutObject::read(body, head.commit.flags));
    Writer w(out);
    w.number(head.commit.rows);
    for (const PutObject& row : rows) {
        std::string_view bytes = body.bytes(row.size);
        std::string name(row.key.name);
        PutOutcome outcome = store(name, bytes, row.crc, head.commit.replaces(), row.key.version);
        w.number(outcome);
        if (outcome == PutOutcome::kOlder) w.number(removals_->newest_for(store_pool().hash(space_, name)));
    }
    if (!body.done()) throw std::runtime_error("a PUT that is none");
}

PutOutcome SimNode::store(const std::string& name, std::string_view bytes, uint32_t crc, bool replace,
                          std::optional<Version> given) {
    Pool& pool = store_pool();
    ObjectTable& table = pool.table();
    bool there = pool.find(space_, name) != kNoSlot || on_disk_alone(name);
    if (there && !replace) return PutOutcome::kExists;
    if (there && planted_.replace_lost) return PutOutcome::kStored;
    Hash128 hash = pool.hash(space_, name);
    std::optional<Version> version = removals_->of_put(hash, given);
    if (!version && planted_.older_taken) version = given;
    if (!version) return PutOutcome::kOlder;
    const uint32_t full = options_.full;
    if (replace && full != 0 && world_.random.below(100) < full) return PutOutcome::kRefused;
    if (replace) removals_->add(hash, given.value_or(kNoVersion));
    std::optional<Extent> lease = pool.lease(bytes.size(), bytes.size());
    if (!lease) return PutOutcome::kRefused;
    Extent extent{lease->offset, bytes.size()};
    std::memcpy(pool.writable() + extent.offset, bytes.data(), bytes.size());
    bool stored = crc32c(0, bytes.data(), bytes.size()) == crc && pool.leases().commit(extent);
    // Two groups, so that what is being written is evicted, too.
    RetentionHints hints;
    if (options_.memory_objects != 0) hints.group = {1 + hash.low % 2, 1};
    if (stored && table.commit(space_, hash, name, extent, crc, kNoSlot, replace, hints, *version) !=
                      ObjectTable::Commit::kStored) {
        pool.leases().free(extent);
        stored = false;
    }
    pool.leases().close(lease->offset);
    if (stored && ssd_ != nullptr) stored_.emplace(name, bytes);
    return stored ? PutOutcome::kStored : PutOutcome::kRefused;
}

std::optional<std::string> SimNode::read(const std::string& name) const {
    if (pool() == nullptr) return std::nullopt;
    uint32_t slot = pool()->find(space_, name);
    if (slot == kNoSlot) return std::nullopt;
    const IndexEntry& entry = pool()->table().entry(slot);
    return std::string(reinterpret_cast<const char*>(pool()->data() + entry.offset), entry.size);
}

void SimNode::on_read(const FrameHeader&, Reader body, Bytes& out) {
    const ObjectTable& table = store_pool().table();
    body.number<uint32_t>();  // the space; there is one
    auto n = body.number<uint32_t>();
    Writer w(out);
    w.number(n);
    std::string bytes;
    for (uint32_t i = 0; i < n; ++i) {
        ReadAsk ask = ReadAsk::read(body);
        uint32_t slot = kNoSlot;
        if (!ask.pinned()) {
            slot = store_pool().find(space_, ask.name);
        } else if (table.readable(ask.slot, ask.generation)) {
            slot = ask.slot;
        }
        if (slot == kNoSlot) {
            w.number(ReadRow{.size = kReadMiss});
            continue;
        }
        const IndexEntry& entry = table.entry(slot);
        w.number(ReadRow{entry.size, entry.size, table.generation(slot), entry.crc, slot});
        bytes.append(reinterpret_cast<const char*>(store_pool().data() + entry.offset), entry.size);
        if (!ask.pinned()) store_pool().table().touch(slot);
    }
    w.bytes(bytes.data(), bytes.size());
}

void SimNode::on_lookup(Caller& caller, const FrameHeader&, Reader body, Bytes& out) {
    LookupHead head = LookupHead::read(body);
    ObjectTable& table = store_pool().table();
    std::vector<Descriptor> found(head.names);
    std::vector<Pinned> pinned;
    uint32_t hits = 0;
    for (Descriptor& row : found) {
        std::string_view name = body.bytes16();
        uint32_t slot = store_pool().find(space_, name);
        if (slot == kNoSlot) {
            auto on_disk = head.pins() ? std::nullopt : on_disk_alone(name);
            if (!on_disk) continue;
            row = Descriptor{0, on_disk->size, on_disk->sequence | kOnSsd, on_disk->crc, kNoSlot};
            ++hits;
            continue;
        }
        const IndexEntry& entry = table.entry(slot);
        row = Descriptor{entry.offset, entry.size, table.generation(slot), entry.crc, slot};
        ++hits;
        pinned.push_back({slot, row.generation});
        if (!head.pins()) table.touch(slot);
    }
    uint64_t pin = head.pins() && hits != 0 ? next_pin_++ : 0;
    if (pin != 0 && !planted_.pin_lost) {
        for (const Pinned& what : pinned) table.pin(what.slot);
        caller.pins.emplace(pin, std::move(pinned));
    }
    Writer w(out);
    LookupFound{pin, hits, false, head.names}.write(w);
    for (const Descriptor& row : found) w.number(row);
}

void SimNode::on_remove(const FrameHeader&, Reader body, Bytes& out) {
    body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    bool ordered = (n & kRemoveVersions) != 0;
    n &= ~kRemoveVersions;
    std::vector<std::string> names;
    for (uint32_t i = 0; i < n; ++i) names.emplace_back(body.bytes16());
    bool exact = !ordered && body.left() != 0;
    Writer w(out);
    w.number(n);
    std::string manifests;
    for (const std::string& name : names) {
        uint64_t number = ordered || exact ? body.number<uint64_t>() : 0;
        Version version = ordered ? number : UINT64_MAX;
        if (!exact && !planted_.removal_lost) removals_->add(store_pool().hash(space_, name), version);
        ObjectTable& table = store_pool().table();
        uint32_t slot = store_pool().find(space_, name);
        bool goes =
            slot != kNoSlot && (exact ? table.generation(slot) == number : table.version(slot) < version);
        if (slot != kNoSlot && !goes) {
            w.number(kNotRemoved);
            continue;
        }
        std::string bytes = goes ? *read(name) : std::string();
        bool is_manifest = may_be_manifest(std::as_bytes(std::span(bytes)));
        if (is_manifest) manifests += bytes;
        bool was_there = goes;
        if (goes && !planted_.removal_lost) table.remove(slot);
        if (ssd_ != nullptr && (goes || !exact)) {
            bool on_disk = ssd_->holds(store_pool(), space_, name), stays = false;
            if (!planted_.removal_lost && (on_disk || !planted_.write_survives))
                stays = ssd_->forget_older(store_pool().hash(space_, name), exact ? UINT64_MAX : version);
            was_there |= on_disk && !stays;
        }
        w.number(is_manifest ? kRemovedManifest : was_there ? kRemoved : kNotRemoved);
    }
    w.bytes(manifests.data(), manifests.size());
}

}  // namespace moonpool::sim
