// SimNode: its life, and its agents towards masters.
#include "node.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/crc32c.hpp"
#include "frames.hpp"
#include "store/shared/stripes.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

namespace {

constexpr size_t kLogRowsMax = 256;  // small, so that it overflows now and then
constexpr uint32_t kObjectsMax = 256;
constexpr size_t kRemovalsPerFrame = 16;
constexpr uint64_t kArenaBytes = 1 << 20;
constexpr uint64_t kMemoryLeft = 128 << 10;  // of an arena above a disk: little, so that all of it is written

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
        removals_->set_on_confirmed(
            [this](uint32_t range, Version version) { ssd_->set_applied(range, version); });
        for (uint32_t range = 0; range < ranges_; ++range) removals_->begin_at(range, ssd_->applied(range));
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
            [this, range] { return removals_->confirmed(range.index); },
            [this, range](Version version) {
                removals_->confirm(range.index, version);
                return true;
            },
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

}  // namespace moonpool::sim
