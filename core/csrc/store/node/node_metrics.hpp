// What a node counts: atomics, written by its loop, read by anyone.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/latency.hpp"

namespace moonpool {

struct NodeMetrics {
    using Counter = std::atomic<uint64_t>;
    Counter connections_total{0}, connections_refused_total{0};
    Counter connections_dropped_total{0}, connections_closed_total{0};  // by the node; by their clients
    Counter auth_failures_total{0}, protocol_errors_total{0}, handshake_timeouts_total{0};
    Counter stored_total{0}, stored_bytes_total{0}, exists_total{0}, put_refused_total{0};
    Counter lookup_keys_total{0}, lookup_hits_total{0};
    Counter served_total{0}, served_bytes_total{0};  // objects and bytes that readers say they have read
    Counter removed_total{0}, lease_refused_total{0};
    Counter pins_refused_total{0};  // objects that were not pinned for a share that is used up
    Counter pins_idle_total{0};     // callers of other hosts that were given up with their pins
    Counter tcp_sent_bytes_total{0}, tcp_received_bytes_total{0};  // of objects
    Counter tcp_damaged_total{0};  // objects that did not match their checksum on arrival
    Counter scrub_dropped_total{0};
    LatencyHistogram lease, commit, lookup, other;
};

inline void count(NodeMetrics::Counter& counter, uint64_t n = 1) {
    counter.fetch_add(n, std::memory_order_relaxed);
}

}  // namespace moonpool
