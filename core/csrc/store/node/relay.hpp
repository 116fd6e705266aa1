// Relay: the node's half of the way from the processes of its host to the master. Each process has a
// connection to the node, and all of them share one from the node to the master: a master of 10,000 hosts has
// 10,000 connections of clients, and not 80,000.
//
//   process --Unix socket--> RelayClient --.
//   process --Unix socket--> RelayClient ----> RelayLink --TCP, one for each tenant and range--> master
//
// A connection of a process lives as long as the link's to the master does: when that ends, theirs end with
// the reason. So a process has, towards a node that relays, the same to expect as towards the master: a
// connection is one to one life of one master.
//
// What the questions mean is the master's matter; the relay looks at their form only
// (directory/questions.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "base/hmac.hpp"
#include "base/result.hpp"
#include "directory/ranges.hpp"
#include "directory/relay_table.hpp"
#include "wire/auth.hpp"
#include "wire/limits.hpp"
#include "wire/secrets.hpp"
#include "wire/tenant_keys.hpp"
#include "wire/tls.hpp"

namespace moonpool {

struct RelayOptions {
    std::string master;  // "host:port", or several with commas between; semicolons between ranges
    Secrets token;
    std::string interface;
    std::shared_ptr<const TlsClient> tls;  // null: plain
    int timeout_ms = 500;                  // of the master, without progress; also of an attempt to connect
    RelayLimits limits{};
    Limits frames{};                                      // of the processes' connections
    std::shared_ptr<const TenantKeys> tenants = nullptr;  // of the node; null: none
};

// A process that has proved the cluster token, or its tenant's key, to the node's loop, and waits for the
// WELCOME.
struct RelayCaller {
    Fd fd;
    std::string tenant;
    Range range{};  // of the shards, whose master it asks
    Mac proof{};    // the node's, which the WELCOME carries
    uint64_t request_id = 0;
    Access access{};
};

struct RelayCounters {
    std::atomic<uint64_t> connections{0}, connected{0};  // of processes; links that have a master
    std::atomic<uint64_t> questions_total{0}, late_total{0}, members_total{0}, refused_total{0},
        links_lost_total{0};
};

class RelayClient;
class RelayLink;

class Relay {
   public:
    static Result<std::unique_ptr<Relay>> create(RelayOptions options);
    ~Relay();
    Relay(const Relay&) = delete;

    Status start();
    void stop();                     // idempotent
    void adopt(RelayCaller caller);  // any thread
    uint32_t ranges() const { return static_cast<uint32_t>(masters_.size()); }
    size_t connections() const { return counters_.connections.load(); }
    std::vector<std::pair<std::string, uint64_t>> gauges() const;

   private:
    friend class RelayClient;
    friend class RelayLink;
    explicit Relay(RelayOptions options)
        : options_(std::move(options)), masters_(split_ranges(options_.master)) {}

    void take(RelayCaller caller);
    RelayClient* client(RelayTable::ClientId id);
    void drop(RelayTable::ClientId id);
    void on_tick(uint64_t now_ms);
    void end_withdrawn();

    // Of the loop's thread, but for what says otherwise.
    RelayOptions options_;
    std::vector<std::string> masters_;  // of each range
    RelayCounters counters_;            // any thread
    std::unique_ptr<EventLoop> loop_;
    std::map<std::pair<std::string, uint32_t>, std::shared_ptr<RelayLink>> links_;  // by tenant and range
    std::unordered_map<RelayTable::ClientId, std::shared_ptr<RelayClient>> clients_;
    RelayTable::ClientId next_client_ = 1;
    uint64_t tenants_seen_ = 0;  // version of the tenants' keys by which processes were looked at
};

}  // namespace moonpool
