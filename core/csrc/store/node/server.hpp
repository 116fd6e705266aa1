// Server: a node's data plane. One event loop, which owns every pool, connection, lease and pin;
// nothing in it blocks on a peer. The bytes of objects never pass through it: clients copy them from and to
// the arena, whose descriptor they get with the handshake.
//
// A connection that ends, however it ends, gives back all it held: leases (what was not committed), pins.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "base/journal.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "base/soft_limit.hpp"
#include "store/node/block_events.hpp"
#include "store/node/handed_node.hpp"
#include "store/node/memory_shares.hpp"
#include "store/node/node_member.hpp"
#include "store/node/node_metrics.hpp"
#include "store/node/outgoing_objects.hpp"
#include "store/node/pool.hpp"
#include "store/node/relay.hpp"
#include "store/node/ssd_tier.hpp"
#include "wire/auth.hpp"
#include "wire/frame.hpp"
#include "wire/limits.hpp"
#include "wire/listener.hpp"
#include "wire/secrets.hpp"
#include "wire/tenant_keys.hpp"

namespace moonpool {

// What a process gets from the one that it replaces.
struct Predecessor {
    HandedNode node;
    std::vector<Fd> descriptors;  // as HandedNode says
    // bytes: a memory file with what HandedNode::write() made.
    static Result<std::shared_ptr<Predecessor>> read(Fd bytes, std::vector<Fd> descriptors);
};

struct ServerOptions {
    std::string socket_path;  // empty: no socket, connections come by attach()
    Secrets token;
    std::shared_ptr<TenantKeys> tenants = std::make_shared<TenantKeys>();  // keys beside the token
    std::vector<PoolOptions> pools;
    LimitsByTenant tenant_limits;  // of some of them
    Limits limits;
    VersionRange versions = kWireVersions;                // of the wire format, that are spoken here
    uint64_t scrub_bytes_per_s = 64ull << 20;             // 0: no scrub
    std::vector<std::string> listen;                      // TCP addresses, host:port; none: this host only
    std::shared_ptr<const TlsServer> data_tls = nullptr;  // their connections are inside TLS; null: plain
    SsdOptions ssd;                                       // no directories: none
    bool events = false;                                  // tell subscribers of blocks
    ClusterOptions cluster;               // its address: empty, or its port 0: as the first of `listen`
    std::string size_option = "--dram ";  // how a user gives the arena's size; for the sentence
    std::string memory_root;              // a prefix of /proc and /sys, for tests
    std::shared_ptr<Predecessor> predecessor = nullptr;  // null: a node that begins anew
};

class Connection;

class Server {
   public:
    static Result<std::unique_ptr<Server>> create(ServerOptions options);
    ~Server();

    // Of a server with a predecessor: all of start() that can fail. No client notices; stop() undoes it.
    Status prepare();
    Status start();
    void stop();  // idempotent; every connection is closed

    // ---- to another process (server_handed.cpp); one thread at a time, any but the loop's

    struct Given {
        Fd description;                // a memory file, as HandedNode::write() makes
        std::vector<int> descriptors;  // as HandedNode says; they stay this server's
    };
    // Serves no more, and says what another process needs to go on. Then take_back(): it serves as before; or
    // let_go(): it has ended, and the other process serves. An error: it serves on.
    Result<Given> give();
    void take_back();
    void let_go();
    // Why it cannot be given; empty: it can.
    std::string why_not_given() const;
    // Of a node that is a member, as ClusterOptions::learned; learn_masters() is of before start().
    std::vector<std::string> learned_masters() const {
        return started_ && member_ != nullptr ? member_->learned() : std::vector<std::string>();
    }
    void learn_masters(std::vector<std::string> of_ranges) {
        options_.cluster.learned = std::move(of_ranges);
    }

    // Whether the loop, and the listener where there is one, answer within the time; any other thread.
    bool is_alive(uint32_t timeout_ms);
    // How much of the arenas' memory is reserved; short: no more will come.
    struct Memory {
        uint64_t reserved_bytes = 0, bytes = 0;
        bool is_short = false;
    };
    Memory memory() const;
    Journal& journal() const { return *journal_; }
    // The tenants' own keys, from now on. Connections by others end within a tick. Any thread.
    void set_tenants(std::vector<TenantRow> rows) { options_.tenants->replace(std::move(rows)); }

    // The tenants' limits, from now on. An error: those from before are in force. Any thread but the loop's.
    Status set_limits(LimitsByTenant limits);

    // One end of a fresh socket pair, already accepted: the way in for the process that embeds the node.
    Result<Fd> dial();

    // The TCP addresses, with their real ports.
    std::vector<std::string> addresses() const;
    const Incarnation& incarnation() const { return incarnation_; }
    const NodeMetrics& metrics() const { return metrics_; }
    std::vector<std::pair<std::string, uint64_t>> snapshot();  // counters and gauges by name; any thread
    bool check_integrity();                                    // runs on the loop
    std::optional<MemberAgent::State> membership() const;      // nothing: the node has no master
    std::vector<SsdTier::Device> ssd();
    BlockEvents* events() const { return events_.get(); }  // nullptr: off
    // Keeps account of blocks from now on, and enters those that are there. Without a subscriber a node does
    // not: it would cost each commit some 0.8 us. False: the loop did not answer in time; call it again. Any
    // thread but the loop's, one at a time.
    bool begin_events();
    // Where other hosts subscribe to them, for the master to tell. Before start().
    void tell_event_endpoints(std::string events, std::string replay) {
        options_.cluster.events = std::move(events);
        options_.cluster.events_replay = std::move(replay);
    }
    // The objects in memory, piece by piece from a cursor on: 0 first, and 0 behind the last. False: the loop
    // did not answer in time. Any thread but the loop's, as hold().
    bool holdings(uint64_t& cursor, std::vector<HoldingRow>& rows);
    // NodeMember::settled(); empty: the node is in no pool. Any thread.
    std::vector<NodeMember::Settled> settled() {
        return member_ == nullptr ? std::vector<NodeMember::Settled>{} : member_->settled();
    }
    // Keeps the bytes of those that are still there, of one pool and space; nullptr: as above.
    std::shared_ptr<OutgoingObjects> hold(std::vector<HoldingRow> rows);

   private:
    friend class Connection;
    friend class OutgoingObjects;
    // The Unix socket as a handler of the loop.
    struct LocalListener final : EventHandler {
        LocalListener(Server& owner, Fd socket) : server(owner), fd(std::move(socket)) {}
        bool on_events(uint32_t) override {
            server.accept_all(fd.get());
            return true;
        }

        Server& server;
        Fd fd;
    };
    explicit Server(ServerOptions options);

    Status make_pools();
    const HandedPool* handed_pool(const std::string& tenant) const;  // null: there is none
    Result<std::unique_ptr<Pool>> adopt_pool(const PoolOptions& options);
    std::vector<Fd> handed_tcp_sockets();
    Result<Fd> adopt_local_socket();
    Status check_predecessor() const;
    Status listen_locally();
    void adopt_connections();
    void open_adopted();
    void mute(Connection& connection);
    void mute_quiet();
    bool is_quiet(bool has_waited) const;
    void end_unfinished();
    Status quieten();
    Status close_ssd();
    void reopen_ssd();
    HandedNode describe(std::vector<int>& descriptors);
    Status open_door();
    void make_member();
    void end_prepared();
    void listen_for_blocks();
    uint32_t enter_blocks(const Pool& pool, uint32_t slot);
    Status make_loop();
    void accept_all(int listener);
    void adopt(Fd fd);
    void adopt_remote(AuthenticatedConnection caller);
    bool has_room(int fd, TlsStream* tls, bool remote);
    void save_all();
    void write_welcome(Writer& w, Pool& pool, const Access& access) const;
    void end_withdrawn();
    static constexpr uint64_t kOtherFiles = 64;  // arenas, logs, disks, the master, admin pages

    using Connections = std::unordered_map<int, std::shared_ptr<Connection>>;
    std::optional<RelayCaller> take_relayed(Connections::iterator it);
    void drop(int fd, bool cut_off = false);
    bool may_relay() const { return options_.cluster.relay != "never" && !options_.cluster.master.empty(); }
    void look_whether_to_relay();
    void resume(Connection& connection, uint64_t now_ms);
    void on_tick(uint64_t now_ms);
    void post(std::function<void()> f) { loop_->post(std::move(f)); }
    bool call_on_loop(std::function<void()> f);
    void post_if_running(std::function<void()> f) {
        if (running_) post(std::move(f));
    }
    std::vector<std::pair<std::string, uint64_t>> gauges();
    void add_tenant_gauges(std::vector<std::pair<std::string, uint64_t>>& rows) const;
    Status take_limits(const LimitsByTenant& limits);
    void reserve_memory();
    void note_ssd_trouble();

    ServerOptions options_;
    Incarnation incarnation_;
    NodeMetrics metrics_;
    std::map<std::string, std::unique_ptr<Pool>, std::less<>> pools_;
    MemoryShares shares_;
    std::unique_ptr<BlockEvents> events_;  // nullptr: off
    bool events_begun_ = false;            // of the thread that begins them
    std::unique_ptr<SsdTier> ssd_;         // nullptr: none
    Removals removals_;
    std::unique_ptr<Listener> listener_;
    std::unique_ptr<EventLoop> loop_;
    Fd spare_;  // a descriptor to give up when there are no more
    Connections connections_;
    size_t remote_connections_ = 0;      // of them
    size_t remote_connections_max_ = 0;  // as open files allow
    SoftLimit connections_max_;          // of the own host
    uint64_t next_pin_ = 1;

    std::atomic<bool> stopping_{false};  // of reserve_thread_
    std::atomic<bool> prepared_{false};  // the loop runs
    std::atomic<bool> running_{false};
    std::atomic<bool> started_{false};  // it has run: what prepare() began ends with stop()
    bool serves_ = false;               // of the loop
    const bool adopts_;                 // has, or had, a predecessor
    std::atomic<uint64_t> memory_error_{0};
    std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
    std::map<std::string, std::string> ssd_trouble_;  // of the loop: directory -> what was noted
    uint64_t ssd_looked_ms_ = 0;
    uint64_t tenants_seen_ = 0;  // version of the tenants' keys by which connections were looked at
    ServiceThread reserve_thread_;
    std::unique_ptr<NodeMember> member_;
    std::unique_ptr<Relay> relay_;  // nullptr: none; made by start(), before the loop runs
    bool relays_ = false;           // processes are told to use it; of the loop, and of start() before it
    std::shared_ptr<LocalListener> local_;  // null: no socket, or not started
    // Of the loop: it hands its connections to another process. Those in muted_ are not looked at meanwhile.
    bool gives_ = false;
    std::unordered_set<int> muted_;
    bool ssd_closed_ = false;           // of the thread that gives
    std::atomic<bool> ssd_off_{false};  // could not be opened again
    // Of the member's agents: they wait while the node is given, with their connections open, so that no
    // master takes it for lost; and what they bring is carried out before it is described, or not at all.
    enum class Giving : int { kNo, kNow, kGone };
    std::atomic<Giving> giving_{Giving::kNo};
    bool run_for_member(const std::function<void()>& f);
    bool described_ = false;                                         // of the loop
    std::vector<std::shared_ptr<AuthenticatedConnection>> waiting_;  // that came meanwhile
};

}  // namespace moonpool
