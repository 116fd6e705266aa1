// MasterServer: the master's sockets around Master. One event loop; connections come from the
// process's Listener, proved, for the service "member" (nodes) or "directory" (clients).
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
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/journal.hpp"
#include "base/latency.hpp"
#include "base/result.hpp"
#include "base/soft_limit.hpp"
#include "directory/master.hpp"
#include "wire/auth.hpp"
#include "wire/limits.hpp"
#include "wire/listener.hpp"

namespace moonpool {

struct MasterServerOptions {
    std::vector<std::string> addresses;  // host:port each; port 0: any that is free
    std::string token;
    uint32_t beat_ms = 200;
    uint32_t clients_max = 4096;  // connections for the service "directory" as expected; it rises
    std::function<uint64_t()> available_memory;  // in bytes, for more connections; null: it is not asked
    MasterLimits master;
    Limits limits;
    std::shared_ptr<const TlsServer> tls;  // every connection must be inside TLS; null: none is
};

struct MasterServerMetrics {
    using Counter = std::atomic<uint64_t>;
    Counter connections_total{0}, connections_refused_total{0}, connections_dropped_total{0};
    Counter protocol_errors_total{0};
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

   private:
    friend class MasterLink;
    explicit MasterServer(MasterServerOptions options);

    void adopt(AuthenticatedConnection caller, bool is_member);
    bool has_room(AuthenticatedConnection& caller, bool is_member);
    void note_limit(const char* what, const char* setting, const SoftLimit& limit);
    void drop(int fd);
    void close_link(LinkId link);
    void on_tick(uint64_t now_ms);
    void note_members(uint64_t now_ms);
    void note_left(NodeId id);
    bool call_on_loop(std::function<void()> f);
    std::vector<std::pair<std::string, uint64_t>> gauges() const;

    MasterServerOptions options_;
    Incarnation incarnation_;
    MasterServerMetrics metrics_;
    Master master_;
    std::unique_ptr<EventLoop> loop_;
    std::atomic<bool> running_{false};
    std::unordered_map<int, std::shared_ptr<MasterLink>> links_;
    std::unordered_map<LinkId, int> fds_;  // of links_
    uint32_t clients_ = 0, members_ = 0;   // connections of each service
    SoftLimit clients_max_;                // of clients_
    uint64_t noted_nodes_max_;
    LinkId next_link_ = 1;

    // What was noted of the members, as of that epoch.
    struct Noted {
        MemberState state = MemberState::kAlive;
        Incarnation incarnation{};
        std::string name, address;
    };
    std::map<NodeId, Noted> noted_;
    uint64_t noted_epoch_ = 1;  // of a pool without members
    std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
    std::unique_ptr<Listener> listener_;  // last: it hands over to what stands above
};

}  // namespace moonpool
