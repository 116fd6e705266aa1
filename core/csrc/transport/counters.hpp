// What an engine counts: for each transport what it moved, by direction; the rest for the whole engine.
#pragma once

#include <atomic>
#include <cstdint>

namespace moonpool::transport {

struct Traffic {
    std::atomic<uint64_t> slices{0};
    std::atomic<uint64_t> bytes{0};

    void add(uint64_t n, uint64_t size) {
        slices.fetch_add(n, std::memory_order_relaxed);
        bytes.fetch_add(size, std::memory_order_relaxed);
    }
};

struct TransportCounters {
    Traffic read, write;
};

// Counts locally, and adds at the end of its scope: one pair of atomic additions a job.
class Tally {
   public:
    explicit Tally(TransportCounters& counters) : counters_(counters) {}
    ~Tally() {
        if (slices_[0] != 0) counters_.read.add(slices_[0], bytes_[0]);
        if (slices_[1] != 0) counters_.write.add(slices_[1], bytes_[1]);
    }
    Tally(const Tally&) = delete;

    void count(bool write, uint64_t bytes) {
        slices_[write] += 1;
        bytes_[write] += bytes;
    }

   private:
    TransportCounters& counters_;
    uint64_t slices_[2] = {}, bytes_[2] = {};
};

// Of an engine, over all of its transports.
struct Counters {
    std::atomic<uint64_t> retries_total{
        0};  // slices or parts of them that went on to another connection or path
    std::atomic<uint64_t> transfers_total{0};
    std::atomic<uint64_t> transfers_failed_total{0};
    std::atomic<uint64_t> slices_refused_total{0};  // as the target
    std::atomic<uint64_t> connections{0};           // as the target
    std::atomic<uint64_t> connections_refused_total{0};
    std::atomic<uint64_t> protocol_errors_total{0};
    std::atomic<uint64_t> fenced_total{0};
    std::atomic<uint64_t> dials_total{0};
    std::atomic<uint64_t> notifications_sent_total{0};
    std::atomic<uint64_t> notifications_received_total{0};
    std::atomic<uint64_t> notifications_refused_total{0};
};

}  // namespace moonpool::transport
