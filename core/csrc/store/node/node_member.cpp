#include "store/node/node_member.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "directory/ranges.hpp"
#include "wire/address.hpp"

namespace moonpool {

namespace {

constexpr size_t kLogRowsMax = 1u << 18;  // 6 MiB; beyond it the master is told everything anew
constexpr size_t kRemovalsPerFrame = 4096;

MemberAgentOptions agent_options(const ClusterOptions& options, const Secrets& token,
                                 const std::string& socket_path, const Incarnation& incarnation) {
    MemberAgentOptions agent;
    agent.claims = std::make_shared<MasterClaims>();
    agent.token = token;
    agent.interface = options.interface;
    agent.tls = options.tls;
    agent.journal = options.journal;
    agent.timeout_ms = options.timeout_ms;
    agent.identity = NodeIdentity{options.name, incarnation,    options.host_id,      options.address,
                                  socket_path,  options.events, options.events_replay};
    return agent;
}

}  // namespace

NodeMember::ToMaster::ToMaster(const MemberAgentOptions& options, MemberHooks hooks, DeltaLog* next,
                               bool learned, size_t id)
    : id(static_cast<uint32_t>(id)),
      range(options.range),
      learned(learned),
      log(
          kLogRowsMax, [this] { agent.wake(); }, next, range),
      agent(options, std::move(hooks), log) {}

NodeMember::NodeMember(const ClusterOptions& options, const Secrets& token, const std::string& socket_path,
                       const Incarnation& incarnation, Pools& pools, SsdTier* ssd, Removals& removals,
                       RunOnLoop run_on_loop, std::function<bool()> stands_still)
    : pools_(pools),
      ssd_(ssd),
      removals_(removals),
      holdings_(pools, ssd, removals),
      run_on_loop_(std::move(run_on_loop)),
      stands_still_(std::move(stands_still)),
      agents_(agent_options(options, token, socket_path, incarnation)),
      handed_(options.learned) {
    std::vector<std::string> ranges = split_ranges(options.master);
    const auto count = static_cast<uint32_t>(ranges.size());
    DeltaLog* next = nullptr;
    for (uint32_t index = count; index-- > 0;) {  // from the last, which has no next one
        std::vector<std::string> masters = split_addresses(ranges[index]);
        for (size_t i = masters.size(); i-- > 0;) {
            MemberAgentOptions agent = agent_of(masters[i], Range{index, count});
            auto to = std::make_unique<ToMaster>(agent, hooks(agent.range), next, false, masters_.size());
            next = &to->log;
            if (last_ == nullptr) last_ = next;
            masters_.insert(masters_.begin(), std::move(to));
        }
        known_.emplace(known_.begin(), std::move(masters));
    }
    for (auto& [tenant, pool] : pools_) pool->table().set_delta_log(next);
    if (ssd_ != nullptr) ssd_->set_delta_log(next);
}

NodeMember::~NodeMember() {
    stop();
    for (auto& [tenant, pool] : pools_) pool->table().set_delta_log(nullptr);
    if (ssd_ != nullptr) ssd_->set_delta_log(nullptr);
}

MemberHooks NodeMember::hooks(const Range& range) {
    return {[this, range](uint64_t& cursor, std::vector<DeltaRow>& rows) {
                return inventory(cursor, rows, range);
            },
            [this](NodeLoad& l) { return load(l); },
            [this, range](const Drops& drops) { return drop(drops, range); },
            [this, range] { return removals_.applied(range.index); },
            [this, range] { return removals_.confirmed(range.index); },
            [this, range](Version version) { return confirm(version, range); },
            [this] { return is_empty(); },
            [this, range](Version before, Version& cursor, std::vector<Drop>& rows) {
                return this->removals(before, cursor, rows, range);
            },
            [this] { return ssd_ != nullptr; }};
}

MemberAgentOptions NodeMember::agent_of(std::string master, const Range& range) {
    MemberAgentOptions agent = agents_;
    agent.master = std::move(master);
    agent.range = range;
    agent.on_masters = [this, range](const MasterList& list, const std::string& at) {
        hear(range, [&](KnownMasters& known, bool) { return known.hear(list, at); });
    };
    agent.on_owner = [this, range](const std::string& owner, const std::string& at) {
        hear(range,
             [&](KnownMasters& known, bool none_answers) { return known.hear_of(owner, at, none_answers); });
    };
    return agent;
}

// On an agent's thread, or in start().
void NodeMember::hear(const Range& range, const Heard& heard) {
    MutexLock lock(masters_mutex_);
    if (!running_) return;
    bool none_answers = true;
    for (const auto& to : masters_)
        none_answers &= to->range.index != range.index || !to->agent.state().joined;
    KnownMasters& known = known_[range.index];
    if (heard(known, none_answers) || starts_again_) follow(range, known.learned());
}

// An agent for each of these; the others that were made for such addresses end with their connections.
void NodeMember::follow(const Range& range, const std::vector<std::string>& learned) {
    std::vector<std::string> fresh = learned;
    std::vector<ToMaster*> idle;
    size_t behind = 0;  // of the range
    for (size_t i = 0; i < masters_.size(); ++i) {
        ToMaster& to = *masters_[i];
        if (to.range.index != range.index) continue;
        behind = i + 1;
        if (!to.learned) continue;
        const std::string place = to.agent.place();
        const bool named = std::erase(fresh, place) != 0;
        (void)to.agent.set_master(named ? place : "");
        if (!named) idle.push_back(&to);
    }
    for (const std::string& address : fresh) {
        if (agents_.journal != nullptr) {
            agents_.journal->note(Level::kInfo, "master_learned", address, "a master names this one, too");
        }
        auto free = std::ranges::find_if(idle, [&](ToMaster* to) { return to->agent.set_master(address); });
        if (free != idle.end()) {
            idle.erase(free);
            continue;
        }
        auto to = std::make_unique<ToMaster>(agent_of(address, range), hooks(range), nullptr, true,
                                             masters_.size());
        last_->append(to->log);  // before its inventory begins
        last_ = &to->log;
        masters_.insert(masters_.begin() + static_cast<std::ptrdiff_t>(behind++), std::move(to));
    }
    starts_again_ = false;  // with the next list, where no thread is left
    for (const auto& to : masters_) starts_again_ |= to->learned && !to->agent.start();
}

std::string NodeMember::masters() const {
    std::string list;
    MutexLock lock(masters_mutex_);
    for (size_t range = 0; range < known_.size(); ++range) {
        std::vector<std::string> those = known_[range].configured();
        for (const std::string& one : known_[range].learned()) {
            const bool serves = std::ranges::any_of(masters_, [&](const auto& to) {
                return to->range.index == range && to->agent.place() == one && to->agent.state().joined;
            });
            if (serves) those.push_back(one);
        }
        for (size_t i = 0; i < those.size(); ++i) list += (i != 0 ? "," : range != 0 ? ";" : "") + those[i];
    }
    return list;
}

std::vector<std::string> NodeMember::learned() const {
    std::vector<std::string> of_ranges;
    MutexLock lock(masters_mutex_);
    for (const KnownMasters& known : known_) {
        std::string& list = of_ranges.emplace_back();
        for (const std::string& one : known.learned()) list += (list.empty() ? "" : ",") + one;
    }
    return of_ranges;
}

size_t NodeMember::known_count() const {
    MutexLock lock(masters_mutex_);
    return known_.size();
}

std::vector<NodeMember::ToMaster*> NodeMember::all() const {
    std::vector<ToMaster*> list;
    MutexLock lock(masters_mutex_);
    for (const auto& to : masters_) list.push_back(to.get());
    return list;
}

Status NodeMember::start() {
    {
        MutexLock lock(masters_mutex_);
        running_ = true;
    }
    for (ToMaster* to : all()) {
        if (Status status = to->agent.start(); !status) return status;
    }
    // An owner's list has the last word on them, as on all that is learned.
    if (const auto count = static_cast<uint32_t>(handed_.size()); count == known_count()) {
        for (uint32_t index = 0; index < count; ++index) {
            MasterList list;
            for (const std::string& one : split_addresses(handed_[index])) list.add(one);
            hear(Range{index, count}, [&](KnownMasters& known, bool) { return known.hear(list); });
        }
    }
    return success();
}

void NodeMember::stop() {
    if (fork_.in_child()) return;  // a thread of the parent may have held the lock
    {
        MutexLock lock(masters_mutex_);
        running_ = false;  // none is made any more
    }
    for (ToMaster* to : all()) to->agent.stop();
}

void NodeMember::abandon() {
    {
        MutexLock lock(masters_mutex_);
        running_ = false;
    }
    for (ToMaster* to : all()) to->agent.abandon();
}

MemberAgent::State NodeMember::state() const {
    std::optional<MemberAgent::State> first;
    const std::vector<ToMaster*> masters = all();
    for (size_t i = 0; i < masters.size();) {
        const uint32_t range = masters[i]->range.index;
        std::optional<MemberAgent::State> of_range;
        for (; i < masters.size() && masters[i]->range.index == range; ++i) {
            MemberAgent::State state = masters[i]->agent.state();
            if (!of_range || (state.joined && !of_range->joined)) of_range = std::move(state);
        }
        if (!of_range->joined) return *of_range;
        if (!first) first = std::move(of_range);
    }
    return *first;
}

std::vector<NodeMember::Settled> NodeMember::settled() {
    std::vector<Settled> rows;
    for (ToMaster* to : all()) {
        to->agent.settle_soon();
        rows.push_back(
            {to->id, to->range.index, to->agent.state().joined, to->agent.counters().settled_total.load()});
    }
    return rows;
}

// What a piece fills in is shared with it: it may run after its caller has given up.
bool NodeMember::inventory(uint64_t& cursor, std::vector<DeltaRow>& rows, const Range& range) {
    struct Piece {
        uint64_t cursor;
        std::vector<DeltaRow> rows;
    };
    auto piece = std::make_shared<Piece>(Piece{cursor, {}});
    bool done = run_on_loop_(
        [this, piece, range] { piece->cursor = holdings_.inventory(piece->cursor, piece->rows, range); });
    if (!done) return false;
    cursor = piece->cursor;
    rows = std::move(piece->rows);
    return true;
}

bool NodeMember::load(NodeLoad& load) {
    if (stands_still_()) {
        MutexLock lock(load_mutex_);
        if (last_load_) load = *last_load_;
        if (last_load_) return true;
    }
    auto now = std::make_shared<NodeLoad>();
    if (!run_on_loop_([this, now] { *now = holdings_.load(now_ms()); })) return false;
    load = *now;
    MutexLock lock(load_mutex_);
    last_load_ = std::move(*now);
    return true;
}

// Not known of a store that does not answer: then it counts as holding something.
bool NodeMember::is_empty() {
    auto empty = std::make_shared<bool>(false);
    return run_on_loop_([this, empty] { *empty = holdings_.empty(); }) && *empty;
}

Version NodeMember::removals(Version before, Version& cursor, std::vector<Drop>& rows, const Range& range) {
    struct Piece {
        Version cursor, complete_since = kNoVersion;
        std::vector<Drop> rows;
    };
    auto piece = std::make_shared<Piece>(Piece{cursor, kNoVersion, {}});
    bool done = run_on_loop_([this, piece, before, range] {
        piece->complete_since =
            removals_.before(range.index, before, piece->cursor, kRemovalsPerFrame, piece->rows);
    });
    cursor = done ? piece->cursor : kNoVersion;
    if (!done) return kNoVersion;
    rows = std::move(piece->rows);
    return piece->complete_since;
}

// applied() moves last, when all is carried out.
bool NodeMember::drop(const Drops& drops, const Range& range) {
    if (drops.all && !drop_all(drops.all_before, range)) return false;
    return run_on_loop_([this, drops, range] {
        for (const Drop& drop : drops.items) {
            if (range.contains(drop.hash)) holdings_.drop(drop);
        }
        removals_.set_applied(range.index, drops.upto);
    });
}

bool NodeMember::confirm(Version version, const Range& range) {
    return run_on_loop_([this, version, range] { removals_.confirm(range.index, version); });
}

// Objects move between memory and disks while this goes on, a piece at a time. The disks come first, so that
// nothing more is brought from there into slots that were passed; memory next, with the writes that are not
// on a disk's list yet; then the disks again, for what was written and evicted between the two.
bool NodeMember::drop_all(Version before, const Range& range) {
    if (ssd_ == nullptr) return drop_all_of_memory(before, range);
    return drop_all_of_ssd(before, range) && drop_all_of_memory(before, range) &&
           drop_all_of_ssd(before, range);
}

// Runs some(cursor) -> the next cursor on the loop until the end, cursor 0.
template <class Some>
bool NodeMember::in_pieces(Some some) {
    auto cursor = std::make_shared<uint32_t>(0);
    do {
        if (!run_on_loop_([some, cursor] { *cursor = some(*cursor); })) return false;
    } while (*cursor != 0);
    return true;
}

bool NodeMember::drop_all_of_memory(Version before, const Range& range) {
    return std::ranges::all_of(pools_, [this, before, range](auto& entry) {
        Pool* pool = entry.second.get();
        return in_pieces([this, pool, before, range](uint32_t cursor) {
            return holdings_.drop_some(*pool, cursor, before, range);
        });
    });
}

bool NodeMember::drop_all_of_ssd(Version before, const Range& range) {
    for (size_t device = 0; device < ssd_->devices(); ++device) {
        auto some = [this, device, before, range](uint32_t cursor) {
            return holdings_.drop_some_of_disk(device, cursor, before, range);
        };
        if (!in_pieces(some)) return false;
    }
    return true;
}

std::vector<std::pair<std::string, uint64_t>> NodeMember::gauges() const {
    MemberAgent::State state = this->state();
    uint64_t joined = 0, waiting = 0, overflows = 0, learned = 0;
    const std::vector<ToMaster*> masters = all();
    for (const ToMaster* to : masters) {
        learned += to->learned && !to->agent.master().empty();
        joined += to->agent.state().joined;
        waiting = std::max<uint64_t>(waiting, to->log.size());
        overflows += to->log.overflows();
    }
    auto sum = [&](auto counter) {
        uint64_t of_all = 0;
        for (const ToMaster* to : masters) of_all += to->agent.counters().*counter;
        return of_all;
    };
    return {
        {"master_joined", state.joined ? 1 : 0},
        {"masters_joined", joined},
        {"masters_learned", learned},
        {"master_silent_ms", state.answered_ms},
        {"master_joins_total", sum(&MemberCounters::joins_total)},
        {"master_connect_failures_total", sum(&MemberCounters::connect_failures_total)},
        {"master_inventories_total", sum(&MemberCounters::inventories_total)},
        {"master_rows_sent_total", sum(&MemberCounters::rows_sent_total)},
        {"master_rows_waiting", waiting},
        {"master_rows_waiting_max", kLogRowsMax},
        {"master_log_overflows_total", overflows},
        {"master_beats_total", sum(&MemberCounters::beats_total)},
        {"master_dropped_total", sum(&MemberCounters::dropped_total)},
    };
}

}  // namespace moonpool
