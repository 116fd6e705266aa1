#include "node.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/crc32c.hpp"
#include "frames.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/messages.hpp"

namespace moonpool::sim {

namespace {

constexpr size_t kLogRowsMax = 256;  // small, so that it overflows now and then
constexpr uint32_t kObjectsMax = 256;
constexpr size_t kRemovalsPerFrame = 16;
constexpr Micros kDiskEvery = kSecond;  // at most, as of the superblock

}  // namespace

SimNode::SimNode(World& world, Network& network, const std::vector<SimMaster*>& masters, uint32_t host,
                 bool has_disk, const Planted& planted)
    : Process(world, "node-" + std::to_string(host), host),
      network_(network),
      has_disk_(has_disk),
      planted_(planted) {
    for (SimMaster* master : masters) agents_.emplace_back(master);
    disk_applied_.resize(masters.front()->range().count);
    identity_.name = "node";
    identity_.host_id = "host-" + std::to_string(host);
    identity_.address = "10.0.0." + std::to_string(host) + ":7700";
}

void SimNode::on_start() {
    identity_.incarnation.fill(0);
    uint64_t life = this->life();
    identity_.incarnation[0] = static_cast<uint8_t>(host() + 1);
    std::memcpy(identity_.incarnation.data() + 1, &life, sizeof(life));
    PoolOptions options;
    options.arena_bytes = 1 << 20;
    options.objects_max = kObjectsMax;
    auto pool = Pool::create(options, identity_.incarnation);
    if (!pool) throw std::runtime_error(pool.error().text);
    while (*(*pool)->commit_memory() != 0) (*pool)->open_memory();
    space_ = *(*pool)->open_space("default", "", 8);
    pools_["default"] = std::move(*pool);
    DeltaLog* next = nullptr;
    for (size_t i = agents_.size(); i-- > 0;) {
        agents_[i].log = std::make_unique<DeltaLog>(
            kLogRowsMax, [this, i] { later(1, [this, i] { turn(agents_[i]); }); }, next,
            agents_[i].master->range());
        next = agents_[i].log.get();
    }
    const auto ranges = static_cast<uint32_t>(disk_applied_.size());
    removals_ = std::make_unique<Removals>(ranges);
    for (uint32_t range = 0; range < ranges; ++range) removals_->set_applied(range, disk_applied_[range]);
    for (const auto& [name, on_disk] : disk_) load(name, on_disk);
    store_pool().table().set_delta_log(next);
    holdings_ = std::make_unique<Holdings>(pools_, nullptr, *removals_);
    for (Agent& agent : agents_) {
        agent.protocol = std::make_unique<MemberProtocol>(MemberProtocolOptions{.identity = identity_},
                                                          hooks(agent.master->range()), *agent.log, counters_,
                                                          [this] { return now_ms(); });
        agent.backoff_ms = 50;
        dial_master(agent);
    }
    if (has_disk_) write_disk();
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
            [this] { return has_disk_; }};
}

std::vector<Version> SimNode::all_applied() const {
    std::vector<Version> all;
    for (uint32_t range = 0; range < removals_->ranges(); ++range) all.push_back(removals_->applied(range));
    return all;
}

void SimNode::on_end() {
    callers_.clear();
    for (Agent& agent : agents_) {
        agent.link.reset();
        agent.protocol.reset();
    }
    holdings_.reset();
    if (has_disk_ && planted_.applied_early) disk_applied_ = all_applied();
    removals_.reset();
    pools_.clear();
    for (Agent& agent : agents_) agent.log.reset();
}

// ---- The agents

void SimNode::dial_master(Agent& agent) {
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

bool SimNode::drop(const Drops& drops, const Range& range) {
    if (!planted_.drop_lost) {
        uint32_t cursor = 0;
        do {
            if (drops.all) cursor = holdings_->drop_some(store_pool(), cursor, drops.all_before, range);
        } while (cursor != 0);
        for (const Drop& drop : drops.items) holdings_->drop(drop);
    }
    removals_->set_applied(range.index, drops.upto);
    return true;
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

void SimNode::write_disk() {
    disk_.clear();
    const ObjectTable& table = store_pool().table();
    for (uint32_t slot = 0; slot < table.slots_used(); ++slot) {
        if (!table.committed(slot)) continue;
        std::string name(table.name(slot));
        disk_.emplace(name, OnDisk{*read(name), table.version(slot)});
    }
    disk_applied_ = all_applied();
    later(world_.random.between(kMs, kDiskEvery), [this] { write_disk(); });
}

void SimNode::load(const std::string& name, const OnDisk& on_disk) {
    store(name, on_disk.bytes, crc32c(0, on_disk.bytes.data(), on_disk.bytes.size()), true, on_disk.version,
          true);
}

// ---- The store: as Connection, without its socket.

void SimNode::accept(std::shared_ptr<End> end) {
    uint64_t id = next_caller_++;
    end->on_frame = [this, id](const Bytes& frame) { on_frame(id, frame); };
    end->on_end = [this, id] { drop_caller(id); };
    callers_.emplace(id, Caller{std::move(end), {}});
}

void SimNode::drop_caller(uint64_t id) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
    for (auto& [pin, pinned] : it->second.pins) store_pool().table().unpin(pinned.slot, pinned.generation);
    callers_.erase(it);
}

void SimNode::on_frame(uint64_t id, const Bytes& frame) {
    auto it = callers_.find(id);
    if (it == callers_.end()) return;
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
                if (!planted_.unpin_lost)
                    store_pool().table().unpin(pin->second.slot, pin->second.generation);
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
        PutOutcome outcome = store(name, bytes, row.crc, head.commit.replaces(), row.key.version, false);
        w.number(outcome);
        if (outcome == PutOutcome::kOlder) w.number(removals_->newest_for(store_pool().hash(space_, name)));
    }
    if (!body.done()) throw std::runtime_error("a PUT that is none");
}

PutOutcome SimNode::store(const std::string& name, std::string_view bytes, uint32_t crc, bool replace,
                          std::optional<Version> given, bool recovered) {
    Pool& pool = store_pool();
    ObjectTable& table = pool.table();
    bool there = pool.find(space_, name) != kNoSlot;
    if (there && !replace) return PutOutcome::kExists;
    if (there && planted_.replace_lost) return PutOutcome::kStored;
    Hash128 hash = pool.hash(space_, name);
    std::optional<Version> version = recovered ? given : removals_->of_put(hash, given);
    if (!version && planted_.older_taken) version = given;
    if (!version) return PutOutcome::kOlder;
    if (replace && !recovered && full_ != 0 && world_.random.below(100) < full_) return PutOutcome::kRefused;
    if (replace && !recovered) removals_->add(hash, given.value_or(kNoVersion));
    std::optional<Extent> lease = pool.lease(bytes.size(), bytes.size());
    if (!lease) return PutOutcome::kRefused;
    Extent extent{lease->offset, bytes.size()};
    std::memcpy(pool.writable() + extent.offset, bytes.data(), bytes.size());
    bool stored = crc32c(0, bytes.data(), bytes.size()) == crc && pool.leases().commit(extent);
    if (stored && table.commit(space_, hash, name, extent, crc, kNoSlot, replace, {}, *version) !=
                      ObjectTable::Commit::kStored) {
        pool.leases().free(extent);
        stored = false;
    }
    pool.leases().close(lease->offset);
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
    LookupHead::read(body);
    uint32_t slot = store_pool().find(space_, body.bytes16());
    ObjectTable& table = store_pool().table();
    Descriptor found;
    uint64_t pin = 0;
    if (slot != kNoSlot) {
        const IndexEntry& entry = table.entry(slot);
        found = Descriptor{entry.offset, entry.size, table.generation(slot), entry.crc, slot};
        pin = next_pin_++;
        if (!planted_.pin_lost) {
            table.pin(slot);
            caller.pins.emplace(pin, Pinned{slot, found.generation});
        }
    }
    Writer w(out);
    LookupFound{pin, pin != 0, false, 1}.write(w);
    w.number(found);
}

void SimNode::on_remove(const FrameHeader&, Reader body, Bytes& out) {
    body.number<uint32_t>();
    auto n = body.number<uint32_t>();
    bool ordered = (n & kRemoveVersions) != 0;
    n &= ~kRemoveVersions;
    std::vector<std::string> names;
    for (uint32_t i = 0; i < n; ++i) names.emplace_back(body.bytes16());
    Writer w(out);
    w.number(n);
    for (const std::string& name : names) {
        Version version = ordered ? body.number<Version>() : UINT64_MAX;
        if (!planted_.removal_lost) removals_->add(store_pool().hash(space_, name), version);
        uint32_t slot = store_pool().find(space_, name);
        bool older = slot != kNoSlot && store_pool().table().version(slot) < version;
        w.number(older ? kRemoved : kNotRemoved);
        if (older && !planted_.removal_lost) store_pool().table().remove(slot);
    }
}

}  // namespace moonpool::sim
