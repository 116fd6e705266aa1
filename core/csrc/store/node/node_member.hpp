// NodeMember: a node's place in a pool of many: for each master a log of what changes in its tables, and an
// agent that tells it. What they look at or drop they do on the store's loop, a piece at a time.
//
// The masters are those of ClusterOptions::master and those that one of them names (KnownMasters). An agent
// that is made for such an address stays; when that is forgotten it waits for another one, once its
// connection has ended: a master that a list no longer names may serve clients, and hears of its successor by
// the beats.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "directory/delta_log.hpp"
#include "directory/known_masters.hpp"
#include "directory/member_agent.hpp"
#include "store/node/holdings.hpp"
#include "store/node/pool.hpp"
#include "store/node/ssd_tier.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

struct ClusterOptions {
    // "host:port", or several of one range with commas, and of several ranges with semicolons between; empty:
    // the node is alone
    std::string master;
    // Of each range, with commas: learned by the process before this one. Empty: none.
    std::vector<std::string> learned;
    std::string name;           // of the node, within its host
    std::string host_id;        // equal for all processes of a host
    std::string address;        // of its wire, as others reach it
    std::string events;         // where other hosts subscribe to its KV events; empty: nowhere
    std::string events_replay;  // and where these are replayed
    std::string interface;
    std::shared_ptr<const TlsClient> tls;  // of the way to the master; null: plain
    std::shared_ptr<Journal> journal;      // null: none
    int timeout_ms = 1000;                 // of an answer of the master,
    uint32_t clients_timeout_ms = 500;     // and of one to the node's clients
    // The questions of these clients go over one connection: auto (in a large pool), always, never.
    std::string relay = "auto";
};

class NodeMember {
   public:
    using Pools = Holdings::Pools;
    // Runs f on the store's loop and waits for it, not for ever: false when it was not done in time, and then
    // it may still run later.
    using RunOnLoop = std::function<bool(std::function<void()>)>;
    // stands_still: the loop does nothing until another process has taken over, or not. Its masters hear on.

    NodeMember(
        const ClusterOptions& options, const Secrets& token, const std::string& socket_path,
        const Incarnation& incarnation, Pools& pools, SsdTier* ssd, Removals& removals, RunOnLoop run_on_loop,
        std::function<bool()> stands_still = [] { return false; });
    ~NodeMember();  // before it, the loop has ended or goes on running
    NodeMember(const NodeMember&) = delete;

    Status start();
    void stop();
    void abandon();  // MemberAgent::abandon()
    // Towards the master that it has joined; else towards the first. Of several ranges: towards one of the
    // first range without a master that it has joined, if there is such a one.
    MemberAgent::State state() const;
    std::vector<std::pair<std::string, uint64_t>> gauges() const;
    // Of each master, those of one range behind each other: a number by which it is known again, as more may
    // come, its range, whether the node has joined it, and MemberCounters::settled_total, which moves with
    // the next beats.
    struct Settled {
        uint32_t id;
        uint32_t range;
        bool joined;
        uint64_t beats;
    };
    std::vector<Settled> settled();
    // Of all ranges, with the learned ones that this node has joined, as in ClusterOptions::master. Any
    // thread, never waits.
    std::string masters() const;
    // As ClusterOptions::learned, for the process after this one. Any thread.
    std::vector<std::string> learned() const;
    // What the master of a range asks for; on any thread but the loop's. False when it was not done in time.
    bool drop(const Drops& drops, const Range& range = {});
    bool confirm(Version version, const Range& range);

   private:
    MemberHooks hooks(const Range& range);
    bool inventory(uint64_t& cursor, std::vector<DeltaRow>& rows, const Range& range);
    bool load(NodeLoad& load);
    bool is_empty();
    Version removals(Version before, Version& cursor, std::vector<Drop>& rows, const Range& range);
    bool drop_all(Version before, const Range& range);
    bool drop_all_of_memory(Version before, const Range& range);
    bool drop_all_of_ssd(Version before, const Range& range);
    template <class Some>
    bool in_pieces(Some some);

    Pools& pools_;
    SsdTier* ssd_;  // nullptr: none
    Removals& removals_;
    Holdings holdings_;  // of the loop
    RunOnLoop run_on_loop_;
    std::function<bool()> stands_still_;
    Mutex load_mutex_;
    std::optional<NodeLoad> last_load_ GUARDED_BY(load_mutex_);
    // The tables push to the first one's log, each log to the next one's; those that are made later come
    // last.
    struct ToMaster {
        ToMaster(const MemberAgentOptions& options, MemberHooks hooks, DeltaLog* next, bool learned,
                 size_t id);
        const uint32_t id;
        const Range range;
        const bool learned;
        DeltaLog log;
        MemberAgent agent;
    };
    using Heard = std::function<bool(KnownMasters&, bool none_answers)>;
    void hear(const Range& range, const Heard& heard);
    size_t known_count() const;  // of ranges
    void follow(const Range& range, const std::vector<std::string>& learned) REQUIRES(masters_mutex_);
    MemberAgentOptions agent_of(std::string master, const Range& range);
    std::vector<ToMaster*> all() const;  // those of one range behind each other

    const MemberAgentOptions agents_;  // what all of them have
    ForkGuard fork_;
    const std::vector<std::string> handed_;  // ClusterOptions::learned
    mutable Mutex masters_mutex_;            // held for moments: no agent is waited for
    bool running_ GUARDED_BY(masters_mutex_) = false;
    bool starts_again_ GUARDED_BY(masters_mutex_) = false;  // the thread of an agent could not be started
    DeltaLog* last_ GUARDED_BY(masters_mutex_) = nullptr;
    std::vector<KnownMasters> known_ GUARDED_BY(masters_mutex_);  // of each range
    std::vector<std::unique_ptr<ToMaster>> masters_ GUARDED_BY(masters_mutex_);
};

}  // namespace moonpool
