// What a node counts: atomics, written by its loop, read by anyone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace moonpool {

class LatencyHistogram {
   public:
    static constexpr std::array<double, 14> kBoundsSeconds = {
        1e-6, 2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 100e-3, 1.0};

    void observe(uint64_t ns) {
        size_t i = 0;
        while (i < kBoundsSeconds.size() && static_cast<double>(ns) > kBoundsSeconds[i] * 1e9) ++i;
        counts_[i].fetch_add(1, std::memory_order_relaxed);
        sum_ns_.fetch_add(ns, std::memory_order_relaxed);
    }

    uint64_t count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
    double sum_seconds() const { return static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) * 1e-9; }

   private:
    std::array<std::atomic<uint64_t>, kBoundsSeconds.size() + 1> counts_{};
    std::atomic<uint64_t> sum_ns_{0};
};

struct NodeMetrics {
    using Counter = std::atomic<uint64_t>;
    Counter connections_total{0}, connections_refused_total{0}, connections_dropped_total{0};
    Counter auth_failures_total{0}, protocol_errors_total{0}, handshake_timeouts_total{0};
    Counter stored_total{0}, stored_bytes_total{0}, exists_total{0}, put_refused_total{0};
    Counter lookup_keys_total{0}, lookup_hits_total{0};
    Counter served_total{0}, served_bytes_total{0};  // objects and bytes that readers say they have read
    Counter removed_total{0}, lease_refused_total{0};
    Counter tcp_sent_bytes_total{0}, tcp_received_bytes_total{0};  // of objects
    Counter tcp_damaged_total{0};  // objects that did not match their checksum on arrival
    Counter scrub_dropped_total{0};
    LatencyHistogram lease, commit, lookup, other;
};

}  // namespace moonpool
