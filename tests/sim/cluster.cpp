#include "cluster.hpp"

#include <algorithm>
#include <iterator>
#include <map>

#include "stripe_books.hpp"

namespace moonpool::sim {

namespace {

bool is_write(Operation::Kind kind) {
    return kind == Operation::kPut || kind == Operation::kReplace || kind == Operation::kUnique ||
           kind == Operation::kRemove;
}

// No copy ends but by a removal, and no node or master is away.
bool nothing_is_lost(const Conditions& c) {
    return c.restarts + c.stops + c.broken_links + c.cuts + c.master_restarts + c.client_restarts +
                   c.standby_restarts + c.hand_overs + c.full + c.memory_objects ==
               0 &&
           !c.owner_dies && !c.owner_stops;
}

constexpr Micros kBackWithin = 15 * kSecond, kOperationWithin = 15 * kSecond;

class Cluster {
   public:
    Cluster(uint64_t seed, const Conditions& conditions, const Planted& planted)
        : conditions_(conditions), exists_first_(seed % 2 == 1), world_(seed), network_(world_) {
        uint32_t hosts = conditions.hosts;
        restarts_.resize(hosts);
        back_at_.resize(hosts);
        uint32_t next_host = hosts;
        std::vector<std::vector<SimMaster*>> of_ranges;
        std::vector<SimMaster*> masters;
        for (uint32_t index = 0; index < conditions.ranges; ++index) {
            Range range{index, conditions.ranges};
            Masters& of = masters_.emplace_back();
            of.first =
                std::make_unique<SimMaster>(world_, network_, next_host++, conditions.limits, range, planted);
            of_ranges.push_back({of.first.get()});
            if (conditions.standby) {
                of.standby = std::make_unique<SimMaster>(world_, network_, next_host++, conditions.limits,
                                                         range, planted, of.first.get());
                of_ranges.back().push_back(of.standby.get());
            }
            masters.insert(masters.end(), of_ranges.back().begin(), of_ranges.back().end());
        }
        std::vector<SimNode*> raw;
        for (uint32_t host = 0; host < hosts; ++host) {
            NodeOptions options{conditions.disks, conditions.disk, conditions.memory_objects,
                                conditions.full};
            nodes_.push_back(std::make_unique<SimNode>(world_, network_, masters, host, options, planted));
            raw.push_back(nodes_.back().get());
        }
        for (uint32_t host = 0; host < hosts; ++host) {
            clients_.push_back(std::make_unique<SimClient>(world_, network_, of_ranges, raw, host, planted));
            clients_.back()->set_stripes(conditions.stripes);
        }
        for (Process* process : processes()) {
            double rate = 0.99 + static_cast<double>(world_.random.below(2001)) / 100000;
            process->set_clock(rate, 100000 + world_.random.below(1000000));
            process->start();
        }
    }

    Report run(const Plan& plan) {
        world_.run_until(conditions_.limits.grace_ms * kMs +
                         kSecond);  // everything joins, the master is complete
        Micros begin = world_.now();
        watch();
        for (const Action& action : plan) {
            world_.at(begin + action.at, nullptr, [this, action] { carry_out(action); });
        }
        world_.run_until(begin + conditions_.lasts);
        heal();
        settle();
        Micros healed = world_.now();
        read_all();
        Report report;
        report.finding = books();
        if (!report.finding && conditions_.stripes != 0) report.finding = stripe_books();
        for (auto& client : clients_) {
            if (!client->findings().empty()) report.finding = client->findings().front();
        }
        for (auto& node : nodes_) {
            if (!node->findings().empty()) report.finding = node->findings().front();
        }
        forget();
        if (auto finding = check(history_, healed, nothing_is_lost(conditions_))) report.finding = finding;
        report.history = std::move(history_);
        report.begin = begin;
        report.events = world_.events();
        for (const Masters& of : masters_)
            report.handed_over += of.standby != nullptr && of.standby->was_given();
        return report;
    }

   private:
    // Of one range: the owner at the beginning, and its standby.
    struct Masters {
        std::unique_ptr<SimMaster> first, standby{};
        bool first_is_dead = false, has_taken_over = false;
        Micros restarted_at = 0;
        Micros lost_at = 0;                        // the first one, when the standby takes over
        std::map<uint32_t, Micros> unlisted_at{};  // by host: when the node was last none of those in touch
        Micros whole_at = 0;  // since then all nodes that run have joined the owner in its present life

        // Also by a hand-over.
        bool is_second() const { return has_taken_over || (standby != nullptr && standby->was_given()); }
        SimMaster& owner() const { return is_second() ? *standby : *first; }
    };

    std::vector<Process*> processes() {
        std::vector<Process*> all;
        for (Masters& of : masters_) {
            if (!of.first_is_dead) all.push_back(of.first.get());
            if (of.standby != nullptr) all.push_back(of.standby.get());
        }
        for (auto& node : nodes_) all.push_back(node.get());
        for (auto& client : clients_) all.push_back(client.get());
        return all;
    }

    void begin(Operation operation) {
        SimClient& client = *clients_[operation.client];
        if (!client.running()) return;
        size_t index = history_.size();
        operation.begin = world_.now();
        history_.push_back(operation);
        lives_.push_back(client.life());
        master_knows_.push_back(false);
        bool away = is_away(operation.client, operation.key);
        client.run(operation, [this, index, away](const Operation& done) {
            history_[index] = done;
            history_[index].away =
                away || is_away(done.client, done.key) || (done.from && is_unheard(*done.from, done.key));
            if (is_acknowledged(done)) {
                master_knows_[index] =
                    masters_[clients_[done.client]->range_of_key(done.key)].restarted_at <= done.begin;
                note_knowledge(index);
            }
        });
    }

    // Whether the key's master could not have told the node of that host of a removal a moment ago.
    bool is_away(uint32_t host, uint32_t key) const {
        const Masters& masters = masters_[clients_[host]->range_of_key(key)];
        const SimMaster& owner = masters.owner();
        const Master* master = owner.master();
        // A new master hears of what a node put while it was cut off after the node has joined, and of what
        // was removed after the nodes that know of it have: until then one that comes back has what it had.
        const bool is_new =
            owner.since() != 0 &&
            (world_.now() - owner.since() < conditions_.apart ||
             (back_at_[host] + 5 * kSecond > owner.since() &&
              (masters.whole_at < owner.since() || world_.now() - masters.whole_at < conditions_.apart)));
        const bool was_lost = masters.has_taken_over && world_.now() - masters.lost_at < conditions_.apart;
        auto unlisted = masters.unlisted_at.find(host);
        if (unlisted != masters.unlisted_at.end() && world_.now() - unlisted->second < kRejoin) return true;
        if (master == nullptr || is_new || nodes_[host]->was_stopped(conditions_.apart) ||
            was_cut(host, owner) || (was_lost && was_cut(host, *masters.first)))
            return true;
        Members members = master->membership().current(0);
        const Member* member = members.find(nodes_[host]->identity().incarnation);
        return member == nullptr || member->state != MemberState::kAlive;
    }

    bool was_cut(uint32_t host, const SimMaster& master) const {
        return network_.was_cut(host, master.host(), conditions_.apart) ||
               network_.was_cut(master.host(), host, conditions_.apart);
    }

    void watch() {
        for (Masters& of : masters_) {
            const SimMaster& owner = of.owner();
            note_unlisted(of);
            if (owner.since() == 0 || of.whole_at >= owner.since() || owner.master() == nullptr) continue;
            Members members = owner.master()->membership().current(0);
            bool is_whole = std::ranges::all_of(nodes_, [&](const auto& node) {
                return !node->running() || members.find(node->identity().incarnation) != nullptr;
            });
            if (is_whole) of.whole_at = world_.now();
        }
        note_knowledge();
        world_.at(world_.now() + 50 * kMs, nullptr, [this] { watch(); });
    }

    // A node that joins again tells what it holds, and hears what to drop with the next beats.
    void note_unlisted(Masters& of) {
        const Master* master = of.owner().master();
        if (master == nullptr) return;
        Members members = master->membership().current(0);
        for (uint32_t host = 0; host < nodes_.size(); ++host) {
            const Member* member =
                nodes_[host]->running() ? members.find(nodes_[host]->identity().incarnation) : nullptr;
            if (member == nullptr || member->state != MemberState::kAlive)
                of.unlisted_at[host] = world_.now();
        }
    }

    static bool is_acknowledged(const Operation& o) {
        return is_write(o.kind) && (o.outcome == Operation::kDone || o.outcome == Operation::kPartly);
    }

    // Of which acknowledged writes no process knows any more. After each end of a node or a master, and now
    // and then, as those that know tell a new master, and a master tells nodes.
    void note_knowledge() {
        if (restarts_of_masters_ == 0) return;
        for (size_t i = 0; i < history_.size(); ++i) {
            if (is_acknowledged(history_[i])) note_knowledge(i);
        }
    }
    void note_knowledge(size_t index) {
        Operation& o = history_[index];
        if (o.version == kNoVersion || o.forgotten_at != UINT64_MAX) return;
        if (master_knows_[index]) return;
        const Masters& masters = masters_[clients_[o.client]->range_of_key(o.key)];
        bool known = false;
        for (const auto& node : nodes_) {
            if (!node->running() || node->last_removal("k" + std::to_string(o.key)) < o.version) continue;
            known = true;
            if (masters.owner().running() && node->in_pool(masters.owner())) master_knows_[index] = true;
        }
        if (!known) o.forgotten_at = world_.now();
    }
    void master_forgets(const Masters& masters) {
        ++restarts_of_masters_;
        for (size_t i = 0; i < history_.size(); ++i) {
            if (&masters_[clients_[history_[i].client]->range_of_key(history_[i].key)] == &masters)
                master_knows_[i] = false;
        }
    }

    // Whether its master lists the node of that host, and cannot hear of what it holds: clients which know
    // that read it until the master takes it for silent.
    bool is_unheard(uint32_t host, uint32_t key) const {
        const SimMaster& owner = masters_[clients_[host]->range_of_key(key)].owner();
        if (owner.master() == nullptr || !is_away(host, key)) return false;
        Members members = owner.master()->membership().current(0);
        return members.find(nodes_[host]->identity().incarnation) != nullptr;
    }

    void restart(Process& process, Micros after, bool silently) {
        if (!process.running()) return;
        network_.ended(process, silently);
        process.end();
        note_knowledge();
        world_.at(world_.now() + after, nullptr, [&process] { process.start(); });
    }

    void restart(SimNode& node, const Action& action) {
        if (!node.running() || node.is_shutting_down()) return;
        if (action.flag) node.power_fails();
        if (!node.has_disk() || !action.cleanly || action.flag)
            return restart(node, action.lasts, action.flag);
        network_.ended(node, false);
        node.shut_down([this, &node, after = action.lasts] { restart(node, after, false); });
    }

    void carry_out(const Action& action) {
        uint32_t hosts = conditions_.hosts;
        Micros end = world_.now() + action.lasts;
        SimNode& node = *nodes_[action.host % hosts];
        Masters& masters = masters_[action.host % masters_.size()];
        switch (action.kind) {
            case Action::kOperation:
                return begin(action.operation);
            case Action::kRestart:
                restarts_[action.host % hosts].push_back(world_.now());
                back_at_[action.host % hosts] = end;
                return restart(node, action);
            case Action::kRestartClient:
                return restart(*clients_[action.host % hosts], action.lasts, false);
            case Action::kRestartMaster:
                if (masters.has_taken_over) return;  // there would be two owners
                if (!masters.is_second() && masters.first->running()) {
                    masters.restarted_at = world_.now();
                    master_forgets(masters);
                }
                return restart(*masters.first, action.lasts, action.flag);
            case Action::kStop:
                back_at_[action.host % hosts] = end;
                node.stop();
                return world_.at(end, nullptr, [&node] { node.go_on(); });
            case Action::kBreakLink:
                if (node.running() && !node.stopped()) node.break_master_link();
                return;
            case Action::kCut:
                for (uint32_t cut_off : {action.host, action.other}) {
                    if (cut_off < hosts) back_at_[cut_off] = end;
                }
                network_.cut(action.host, action.other);
                if (action.flag) network_.cut(action.other, action.host);
                return world_.at(end, nullptr, [this, action] {
                    network_.heal(action.host, action.other);
                    network_.heal(action.other, action.host);
                });
            case Action::kRestartStandby:
                // One that has taken over is not started again as a standby of a master that is dead.
                if (masters.standby != nullptr && !masters.is_second())
                    restart(*masters.standby, action.lasts, action.flag);
                return;
            case Action::kOwnerDies:
                // Else its operator starts it again: what it knows is nowhere.
                if (!can_take_over(masters)) return;
                masters.first_is_dead = masters.has_taken_over = true;
                masters.lost_at = world_.now();
                network_.ended(*masters.first, action.flag);
                masters.first->end();
                return world_.at(end, nullptr, [&masters] { masters.standby->take_over(); });
            case Action::kOwnerStops:
                if (!can_take_over(masters)) return;
                masters.first->stop();
                masters.has_taken_over = true;
                masters.lost_at = world_.now();
                world_.at(world_.now() + action.lasts / 2, nullptr,
                          [&masters] { masters.standby->take_over(); });
                return world_.at(end, nullptr, [&masters] { masters.first->go_on(); });
            case Action::kHandOver:
                if (SimMaster& heir = masters.is_second() ? *masters.first : *masters.standby;
                    !masters.has_taken_over && heir.is_whole())
                    heir.ask_hand_over();
                return;
            case Action::kJumpClock:
                return (action.flag ? static_cast<Process&>(*masters.first) : node)
                    .jump_clock(action.lasts / kMs);
        }
    }

    // Of an owner that was started anew and has not met its standby the operator knows that it goes on.
    static bool can_take_over(const Masters& masters) {
        return masters.standby->is_whole() && masters.first->running() && masters.first->minds_standby() &&
               !masters.is_second();
    }

    void heal() {
        network_.heal_all();
        for (Process* process : processes()) {
            process->go_on();
            process->start();
        }
    }

    // What one node alone knows of ends where that node and the master are restarted.
    void forget() {
        for (Operation& o : history_) {
            if (!is_write(o.kind)) continue;
            const bool may_be = masters_[clients_[o.client]->range_of_key(o.key)].restarted_at > o.begin &&
                                (o.alone ? one_was_restarted(o) : is_lost_on_disks(o));
            if (!may_be) o.forgotten_at = UINT64_MAX;
        }
    }

    // The one that knows: the own node, or, where that was away, another one.
    bool one_was_restarted(const Operation& o) const {
        if (!conditions_.disks) return was_restarted(o.client, o.begin, UINT64_MAX);
        for (uint32_t host = 0; host < conditions_.hosts; ++host) {
            if (was_restarted(host, o.begin, UINT64_MAX)) return true;
        }
        return false;
    }

    bool was_restarted(uint32_t host, Micros first, Micros last) const {
        return std::ranges::any_of(restarts_[host], [&](Micros at) { return at > first && at <= last; });
    }

    // A node that has what was removed ended before the removal was safe on its disk, and so did another one
    // that was told, at any time, for it keeps in memory what it was told of.
    bool is_lost_on_disks(const Operation& o) const {
        if (!conditions_.disks) return false;
        const Micros safe = o.end + 2 * kSecond + 4 * conditions_.disk.slow_ms * kMs;
        for (uint32_t holder = 0; holder < conditions_.hosts; ++holder) {
            if (!was_restarted(holder, o.begin, safe)) continue;
            for (uint32_t told = 0; told < conditions_.hosts; ++told) {
                if (told != holder && was_restarted(told, o.begin, UINT64_MAX)) return true;
            }
        }
        return false;
    }

    // Until every node is in the pool, and has carried out what it is to drop.
    void settle() {
        Micros end = world_.now() + kBackWithin;
        auto settled = [&](auto& node) {
            return std::ranges::all_of(masters_, [&](const Masters& of) {
                return node->in_pool(of.owner()) && (of.standby == nullptr || node->in_pool(*of.standby));
            });
        };
        for (Masters& of : masters_) {
            if (of.is_second()) of.standby->take_over();
        }
        while (world_.now() < end && !std::ranges::all_of(nodes_, settled)) {
            world_.run_until(world_.now() + 100 * kMs);
            if (world_.now() >= end - kBackWithin / 2) promote();
        }
        world_.run_until(world_.now() + 2 * kSecond);
    }

    // An operator sees that no master serves: an owner that is started anew within a second of two hand-overs
    // takes the versions that it gave before for another one's.
    void promote() {
        for (Masters& of : masters_) {
            if (of.standby == nullptr || of.first->is_owner() || of.standby->is_owner()) continue;
            of.has_taken_over = true;
            of.standby->take_over();
        }
    }

    void read_all() {
        // Either finds that an object has lost a stripe, and frees it, where the other has not.
        using enum Operation::Kind;
        std::vector<Operation::Kind> rounds{kGet, kGet};
        if (conditions_.stripes != 0) {
            // A new master has met all nodes by then, and says of what it does not know that it is not there.
            world_.run_until(world_.now() + conditions_.limits.grace_ms * kMs);
            // A client whose connection to a master has ended unnoticed has no answer for a while.
            rounds = {kGet, kGet, kGet, kExists, kExists, kExists};
            if (exists_first_) rounds = {kExists, kExists, kExists, kGet, kGet};
        }
        for (Operation::Kind kind : rounds) ask_all(kind);
        Micros end = world_.now() + kOperationWithin;
        auto open = [](const Operation& o) { return o.outcome == Operation::kOpen; };
        while (world_.now() < end && std::ranges::any_of(history_, open)) {
            close_those_of_ended_clients();
            world_.run_until(world_.now() + 100 * kMs);
        }
        close_those_of_ended_clients();
    }

    void ask_all(Operation::Kind kind) {
        for (uint32_t key = 0; key < conditions_.keys; ++key) {
            for (uint32_t client = 0; client < conditions_.hosts; ++client) {
                if (kind != Operation::kExists || clients_[client]->is_striped(key))
                    begin(Operation{.kind = kind, .client = client, .key = key});
            }
        }
        world_.run_until(world_.now() + kSecond);
    }

    void close_those_of_ended_clients() {
        for (size_t i = 0; i < history_.size(); ++i) {
            Operation& o = history_[i];
            if (o.outcome != Operation::kOpen || clients_[o.client]->life() == lives_[i]) continue;
            o.outcome = Operation::kUnknown;
            o.end = world_.now();
        }
    }

    std::optional<Finding> stripe_books() const {
        Contents all;
        LostInStripes lost;
        lost.any = lost.reads_miss = conditions_.memory_objects != 0;
        for (const auto& node : nodes_) {
            node->add_contents(all);
            lost.manifests.insert(node->lost_manifests().begin(), node->lost_manifests().end());
            lost.any |= node->disk_has_lost();
        }
        std::set<std::string> unshown, shown;
        for (const auto& node : nodes_)
            unshown.insert(node->removed_manifests().begin(), node->removed_manifests().end());
        for (const auto& client : clients_) {
            shown.insert(client->shown_manifests().begin(), client->shown_manifests().end());
            lost.manifests.insert(client->unfreed_manifests().begin(), client->unfreed_manifests().end());
        }
        std::ranges::set_difference(unshown, shown, std::inserter(lost.manifests, lost.manifests.end()));
        lost.none = !lost.any && conditions_.restarts == 0 && conditions_.full == 0;
        return check_stripes(all, history_, conditions_.keys, lost);
    }

    std::optional<Finding> books() {
        for (const Operation& o : history_) {
            if (o.outcome == Operation::kOpen)
                return Finding{Finding::kNoEnd, "no end of: " + to_text(o), o.key};
        }
        for (const Masters& of : masters_) {
            for (SimMaster* master : {&of.owner(), of.standby.get()}) {
                if (master == nullptr) continue;
                if (auto finding = books(*master)) return finding;
            }
        }
        return std::nullopt;
    }

    std::optional<Finding> books(const SimMaster& of) {
        const Master& master = *of.master();
        if (!master.check_integrity()) return Finding{Finding::kBooks, "the master's books are not sound"};
        Members members = master.membership().current(0);
        for (auto& node : nodes_) {
            if (!node->in_pool(of))
                return Finding{Finding::kNoEnd, node->name() + " is not back in the pool"};
            const ObjectTable& table = node->pool()->table();
            if (!node->pool()->check_integrity())
                return Finding{Finding::kBooks, node->name() + "'s books are not sound"};
            if (table.counters().pinned != 0) return Finding{Finding::kBooks, node->name() + " keeps a pin"};
            const Member* member = members.find(node->identity().incarnation);
            uint64_t rows = member == nullptr ? 0 : master.directory().rows(member->id, Tier::kDram);
            uint64_t objects = node->objects(of.range()), on_disk = node->objects_on_disk(of.range());
            uint64_t disk_rows = member == nullptr ? 0 : master.directory().rows(member->id, Tier::kSsd);
            if (disk_rows != on_disk) {
                return Finding{Finding::kBooks, node->name() + "'s disk has " + std::to_string(on_disk) +
                                                    " objects, and the directory " +
                                                    std::to_string(disk_rows) + " rows"};
            }
            if (rows != objects) {
                return Finding{Finding::kBooks, node->name() + " has " + std::to_string(objects) +
                                                    " objects, and the directory " + std::to_string(rows) +
                                                    " rows"};
            }
        }
        return std::nullopt;
    }

    Conditions conditions_;
    const bool exists_first_;
    World world_;
    Network network_;
    std::vector<Masters> masters_;  // of each range
    std::vector<std::unique_ptr<SimNode>> nodes_;
    std::vector<std::unique_ptr<SimClient>> clients_;
    std::vector<Operation> history_;
    std::vector<uint64_t> lives_;     // of the client of each
    std::vector<bool> master_knows_;  // of each write
    uint32_t restarts_of_masters_ = 0;
    // Of each host: when its node was restarted, and when it is back from its last fault.
    std::vector<std::vector<Micros>> restarts_;
    std::vector<Micros> back_at_;
};

std::string to_text(Micros at, const Action& action) {
    static const char* const kNames[] = {"",
                                         "restart of node-",
                                         "stop of node-",
                                         "lost link of node-",
                                         "cut ",
                                         "restart of master",
                                         "restart of client-",
                                         "jump of clock of node-",
                                         "death of master",
                                         "restart of standby",
                                         "stop of master",
                                         "hand-over by master"};
    std::string text = std::to_string(at / kMs) + " ms  " + kNames[action.kind];
    bool of_host = action.kind != Action::kRestartMaster && action.kind != Action::kOwnerDies &&
                   action.kind != Action::kRestartStandby && action.kind != Action::kOwnerStops &&
                   action.kind != Action::kHandOver;
    if (of_host) text += std::to_string(action.host);
    if (action.kind == Action::kCut) text += (action.flag ? " <-> " : " -> ") + std::to_string(action.other);
    return text + ", " + std::to_string(action.lasts / kMs) + " ms";
}

}  // namespace

Plan make_plan(uint64_t seed, const Conditions& c) {
    Random random(seed * 2 + 1);
    Plan plan;
    uint32_t weights[] = {c.puts, c.replaces, c.gets, c.removes, c.pins, c.uniques};
    uint32_t all = 0;
    for (uint32_t weight : weights) all += weight;
    for (uint32_t i = 0; i < c.operations; ++i) {
        Operation o;
        uint64_t at = random.below(all);
        uint32_t kind = 0;
        for (; at >= weights[kind]; ++kind) at -= weights[kind];
        o.kind = static_cast<Operation::Kind>(kind);
        o.client = static_cast<uint32_t>(random.below(c.hosts));
        o.key = static_cast<uint32_t>(random.below(c.keys));
        if (o.kind == Operation::kPut) o.key &= ~1u;
        if (o.kind == Operation::kReplace || o.kind == Operation::kUnique) o.key |= 1u;
        o.value = o.kind == Operation::kGet ? 0 : i + 1;
        if (is_write(o.kind) && c.one_writer) o.client = o.key % c.hosts;
        plan.push_back({.at = random.below(c.lasts), .operation = o});
    }
    std::ranges::stable_sort(plan, {}, &Action::at);
    std::map<uint32_t, Micros> next;  // write, of each key
    std::erase_if(plan, [&](const Action& action) {
        if (!is_write(action.operation.kind)) return false;
        Micros& earliest = next[action.operation.key];
        if (action.at < earliest) return true;
        earliest = action.at + c.apart;
        return false;
    });
    auto fault = [&](Action::Kind kind, uint32_t n, Micros shortest, Micros longest) {
        for (uint32_t i = 0; i < n; ++i) {
            Action action{
                .kind = kind, .at = random.below(c.lasts), .lasts = random.between(shortest, longest)};
            action.host = static_cast<uint32_t>(random.below(c.hosts));
            const uint32_t masters = c.ranges * (1 + c.standby);
            action.other = (action.host + 1 + static_cast<uint32_t>(random.below(c.hosts + masters - 1))) %
                           (c.hosts + masters);
            action.flag = random.one_in(2);
            action.cleanly = action.lasts % 2 == 0;
            if (c.standby && kind == Action::kCut && random.one_in(3)) {  // between the masters of a range
                action.host = c.hosts + 2 * (action.host % c.ranges);
                action.other = action.host + 1;
            }
            plan.push_back(action);
        }
    };
    fault(Action::kRestart, c.restarts, 50 * kMs, 3 * kSecond);
    fault(Action::kStop, c.stops, 10 * kMs, 3 * kSecond);
    fault(Action::kBreakLink, c.broken_links, 0, 0);
    fault(Action::kCut, c.cuts, 100 * kMs, 4 * kSecond);
    fault(Action::kRestartMaster, c.master_restarts, 50 * kMs, 2 * kSecond);
    fault(Action::kRestartClient, c.client_restarts, 50 * kMs, kSecond);
    fault(Action::kRestartStandby, c.standby_restarts, 50 * kMs, 2 * kSecond);
    fault(Action::kOwnerDies, c.standby && c.owner_dies, 0, 3 * kSecond);
    fault(Action::kOwnerStops, c.standby && c.owner_stops, 200 * kMs, 5 * kSecond);
    fault(Action::kJumpClock, c.clock_jumps, 100 * kMs, 20 * kSecond);
    fault(Action::kHandOver, c.standby ? c.hand_overs : 0, 0, 0);
    std::ranges::stable_sort(plan, {}, &Action::at);
    return plan;
}

Report run(uint64_t seed, const Conditions& conditions, const Plan& plan, const Planted& planted) {
    return Cluster(seed, conditions, planted).run(plan);
}

// Leaves out ever smaller pieces.
Plan shrink(uint64_t seed, const Conditions& conditions, Plan plan, const Planted& planted,
            const Counts& counts, int tries) {
    for (size_t piece = plan.size() / 2; piece > 0; piece /= 2) {
        for (size_t at = 0; at < plan.size();) {
            if (tries-- == 0) return plan;
            Plan less = plan;
            auto first = less.begin() + static_cast<std::ptrdiff_t>(at);
            less.erase(first, first + static_cast<std::ptrdiff_t>(std::min(piece, plan.size() - at)));
            Report report = run(seed, conditions, less, planted);
            if (report.finding && counts(*report.finding)) {
                plan = std::move(less);
            } else {
                at += piece;
            }
        }
    }
    return plan;
}

std::string explain(uint64_t seed, const Plan& plan, const Report& report) {
    std::string text = "seed " + std::to_string(seed) + ": ";
    text += report.finding ? report.finding->text : "no finding";
    std::vector<std::pair<Micros, std::string>> lines;
    for (const Action& action : plan) {
        if (action.kind == Action::kOperation) continue;
        lines.emplace_back(report.begin + action.at, to_text(report.begin + action.at, action));
    }
    for (const Operation& o : report.history) {
        if (report.finding && report.finding->key && o.key != *report.finding->key) continue;
        lines.emplace_back(o.begin, to_text(o));
    }
    std::ranges::stable_sort(lines, {}, &std::pair<Micros, std::string>::first);
    for (auto& [at, line] : lines) text += "\n  " + line;
    return text;
}

Search search(uint64_t first_seed, uint64_t seeds, const Conditions& conditions, const Planted& planted,
              const Counts& counts) {
    Search found;
    for (uint64_t seed = first_seed; seed < first_seed + seeds && !found.seed; ++seed) {
        Plan plan = make_plan(seed, conditions);
        Report report = run(seed, conditions, plan, planted);
        ++found.seeds;
        found.operations += report.history.size();
        if (!report.finding || !counts(*report.finding)) continue;
        found.seed = seed;
        found.plan = shrink(seed, conditions, std::move(plan), planted, counts, 80);
        found.report = run(seed, conditions, found.plan, planted);
    }
    return found;
}

}  // namespace moonpool::sim
