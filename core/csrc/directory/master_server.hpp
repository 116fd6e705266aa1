// MasterServer: the master's sockets around Master. One event loop; connections come from the
// process's Listener, proved, for the service "member" (nodes), "directory" (clients) or "standby".
//
// A member is heard with every frame it sends. Its connection is its lifeline: when it breaks, the member is
// suspect at once; when it is silent for a second, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/journal.hpp"
#include "base/latency.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/soft_limit.hpp"
#include "directory/master.hpp"
#include "directory/master_list.hpp"
#include "directory/master_pair.hpp"
#include "directory/master_state.hpp"
#include "directory/standby_agent.hpp"
#include "wire/auth.hpp"
#include "wire/limits.hpp"
#include "wire/listener.hpp"
#include "wire/secrets.hpp"
#include "wire/tenant_keys.hpp"

namespace moonpool {

struct MasterServerOptions {
    std::vector<std::string> addresses;  // host:port each; port 0: any that is free
    Secrets token;
    std::shared_ptr<TenantKeys> tenants = std::make_shared<TenantKeys>();  // keys beside the token
    uint32_t beat_ms = 200;
    uint32_t clients_max = 4096;  // connections for the service "directory" as expected; it rises
    std::function<uint64_t()> available_memory;  // in bytes, for more connections; null: it is not asked
    MasterLimits master;
    Range range{};  // of the shards, that it has
    Limits limits;
    std::shared_ptr<const TlsServer> tls;  // every connection must be inside TLS; null: none is
    std::string standby_of;                // host:port of the owner that it follows; empty: it is one
    bool elected = false;                  // follow() or take_over() says what it is; until then nothing
    std::string name;                      // by which an owner tells its standbys apart
    std::string advertise;                 // host:port by which others reach it; empty: as it listens
    std::shared_ptr<const TlsClient> owner_tls;  // of the way there; null: plain
    MasterPairOptions pair;
};

struct MasterServerMetrics {
    using Counter = std::atomic<uint64_t>;
    Counter connections_total{0}, connections_refused_total{0}, connections_dropped_total{0};
    Counter protocol_errors_total{0};
    Counter takeovers_total{0}, standbys_lost_total{0};
    LatencyHistogram join, delta, beat, members, locate, place, forget;
};

class MasterLink;

class MasterServer {
   public:
    // Listens from its return on, at addresses(); serves from start() on.
    static Result<std::unique_ptr<MasterServer>> create(MasterServerOptions options);
    ~MasterServer();
    MasterServer(const MasterServer&) = delete;

    Status start();
    void stop();  // idempotent; every connection is closed

    const std::vector<std::string>& addresses() const { return listener_->addresses(); }
    const Incarnation& incarnation() const { return incarnation_; }
    const MasterServerMetrics& metrics() const { return metrics_; }

    // Any thread; empty when the loop does not answer within 2 s.
    std::vector<std::pair<std::string, uint64_t>> snapshot();
    struct NodeRow {
        Member member;
        uint64_t dram_keys = 0, ssd_keys = 0;
    };
    struct Nodes {
        uint64_t epoch = 0;
        std::vector<NodeRow> rows;  // alive and suspect, by id; then those of the past, newest first
    };
    Nodes nodes();
    bool check_integrity();
    // Whether the loop and the listener answer within the time; any other thread.
    bool is_alive(uint32_t timeout_ms);
    Journal& journal() const { return *journal_; }
    // The tenants' own keys, from now on. Connections by others end within a tick. Any thread.
    void set_tenants(std::vector<TenantRow> rows) { options_.tenants->replace(std::move(rows)); }

    MasterRole role() const { return pair_.role(); }
    // The other one of the two is dead, or will never order removals again: a standby is the owner from now
    // on, an owner that has lost its standby goes on alone. False: neither, or the loop does not answer.
    bool take_over();
    // A standby that knows all takes the place of its owner, which becomes its standby, without a removal
    // that fails. Any thread; waits for it, at most timeout_ms.
    Status ask_hand_over(uint32_t timeout_ms);
    // A standby: its owner is there. Any thread.
    bool hears_owner() const { return pair_.role() != MasterRole::kOwner && agent_->is_connected(); }
    // Of an owner that was elected: the name of the standby that it can hand over to now; empty: none asks.
    // The caller enters that one, and then calls give(), or keep(). False: it is too late, or the loop does
    // not answer; then follow() says what it is.
    std::string gives_to();
    bool give();
    bool keep();
    // Another master is the owner; any thread. False: the loop does not answer.
    bool follow(const std::string& owner);
    // An owner orders nothing after so long, unless this is called again; UINT64_MAX: for ever. Any thread.
    void set_valid_for(uint64_t ms);
    // The election names that standby, by its name; "": none; nothing: it is not known which. Of any other
    // one the word does not count. False: the loop does not answer.
    bool set_elected_standby(std::optional<std::string> name);
    struct Standby {
        std::string name;  // of the standby, as it says; towards a standby: its owner's address
        bool attached = false;
        bool is_whole = false;  // the standby knows all
        uint64_t lag_ms = 0;    // of its word
    };
    Standby standby();

   private:
    friend class MasterLink;
    explicit MasterServer(MasterServerOptions options);

    Error not_served() const;
    MasterLink* standby_link() const;
    std::optional<Error> attach_standby(MasterLink& link, const std::string& name,
                                        const std::string& address);
    std::string own_address() const;
    MasterList masters_now() const;
    std::string owner_elsewhere() const;
    void tell_masters(const MasterList& list);
    void append_masters(std::vector<std::byte>& welcome);
    void note_elected();
    void refuse_held(const Error& why);  // what waits for the standby's word
    void lose_standby(const std::string& why);
    void tell_standby(uint64_t now_ms);
    void hear_standby();
    void release();
    void tick_pair(uint64_t now_ms);
    void serve_no_longer();
    std::optional<Error> begin_hand_over(const std::string& address, uint32_t told);
    void tick_hand_over(uint64_t now_ms);
    bool give_now(uint64_t now_ms);
    void end_hand_over();
    void go_on_serving();
    bool follow_frame(const std::vector<std::byte>& frame);
    void settle_ask(Status how);
    void drop_all(Caller kind, const Error& why);
    void end_all(const Error& why);
    void for_each_client(const std::function<bool(MasterLink&)>& visit);
    bool keep_now();
    void make_agent();
    bool begin_to_follow(const std::string& address);
    void lose_owner(const std::string& why);
    bool take_over_now(uint64_t now_ms, bool given = false);

    uint32_t& count(Caller kind);
    void adopt(AuthenticatedConnection caller, Caller kind);
    bool has_room(AuthenticatedConnection& caller, bool is_member);
    void note_limit(const char* what, const char* setting, const SoftLimit& limit);
    void drop(int fd);
    void close_link(LinkId link);
    void on_tick(uint64_t now_ms);
    void end_withdrawn();
    void note_members(uint64_t now_ms);
    void note_state(uint64_t now_ms);
    Standby standby_now(uint64_t now_ms) const;
    void note_left(NodeId id);
    bool call_on_loop(std::function<void()> f);
    std::vector<std::pair<std::string, uint64_t>> gauges() const;

    MasterServerOptions options_;
    Incarnation incarnation_;
    MasterServerMetrics metrics_;
    Master master_;
    MasterPair pair_;
    std::string not_followed_;  // why, as of the last note of it
    std::unique_ptr<EventLoop> loop_;
    std::atomic<bool> running_{false};
    std::unordered_map<int, std::shared_ptr<MasterLink>> links_;
    std::unordered_map<LinkId, int> fds_;                // of links_
    uint32_t clients_ = 0, members_ = 0, standbys_ = 0;  // connections of each service
    SoftLimit clients_max_;                              // of clients_
    uint64_t noted_nodes_max_;
    LinkId next_link_ = 1;
    int standby_fd_ = -1;
    std::string standby_name_, standby_address_;
    std::optional<std::string> elected_standby_{""};
    mutable Mutex owner_mutex_;
    std::string owner_ GUARDED_BY(owner_mutex_);  // that it follows, as it dials it
    // As it names it to nodes and clients: of the one that it has followed last, and not taken over from.
    std::string named_owner_ GUARDED_BY(owner_mutex_);
    std::string owner() const {
        MutexLock lock(owner_mutex_);
        return owner_;
    }
    bool standby_left_ = false;
    std::string heir_;                      // where the standby is reached that it hands over to
    std::atomic<bool> owner_gives_{false};  // the owner knows how to hand over
    std::unordered_set<int> holding_;       // links with answers that wait for its word
    uint64_t ticked_ms_ = 0, told_masters_ms_ = 0;
    MasterList told_masters_{};
    uint64_t tenants_seen_ = 0;  // version of the tenants' keys by which links were looked at

    // How the hand-over ended that this standby asked for; nothing: it has not.
    Mutex ask_mutex_;
    CondVar asked_;
    std::optional<Status> ask_ended_ GUARDED_BY(ask_mutex_);

    Mutex state_mutex_;
    MasterState state_ GUARDED_BY(state_mutex_);  // as of the last tick; for the listener's thread

    // What was noted of the members, as of that epoch.
    struct Noted {
        MemberState state = MemberState::kAlive;
        Incarnation incarnation{};
        std::string name, address;
    };
    std::map<NodeId, Noted> noted_;
    uint64_t noted_epoch_ = 1;  // of a pool without members
    std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
    std::unique_ptr<StandbyAgent> agent_;  // of a standby
    std::unique_ptr<Listener> listener_;   // last: it hands over to what stands above
};

}  // namespace moonpool
