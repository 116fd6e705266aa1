// How long things take, counted between bounds: atomics, written by one thread, read by anyone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
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

// Counts how long it lived.
class Timed {
   public:
    explicit Timed(LatencyHistogram& histogram)
        : histogram_(histogram), start_(std::chrono::steady_clock::now()) {}
    ~Timed() {
        auto spent = std::chrono::steady_clock::now() - start_;
        histogram_.observe(static_cast<uint64_t>(std::chrono::nanoseconds(spent).count()));
    }

   private:
    LatencyHistogram& histogram_;
    std::chrono::steady_clock::time_point start_;
};

}  // namespace moonpool
