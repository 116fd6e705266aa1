// NodeMember: a node's place in a pool of many: for each master a log of what changes in its tables, and an
// agent that tells it. What they look at or drop they do on the store's loop, a piece at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "directory/delta_log.hpp"
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
    // Of each master, those of one range behind each other: its range, whether the node has joined it, and
    // MemberCounters::settled_total, which moves with the next beats.
    struct Settled {
        uint32_t range;
        bool joined;
        uint64_t beats;
    };
    std::vector<Settled> settled();
    // What the master of a range asks for; on any thread but the loop's. False when it was not done in time.
    bool drop(const Drops& drops, const Range& range = {});

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
    // The tables push to the first one's log, each log to the next one's.
    struct ToMaster {
        ToMaster(const MemberAgentOptions& options, MemberHooks hooks, DeltaLog* next);
        const Range range;
        DeltaLog log;
        MemberAgent agent;
    };
    std::vector<std::unique_ptr<ToMaster>> masters_;
};

}  // namespace moonpool
