// LinkOrder: which of a peer's links a job is offered first, from what jobs have cost.
//
// What a link costs is a time for each slice and a time for each byte, fitted to the jobs that it carried as
// a whole, the latest ones most. Of two links the one that the registry has first is tried first, until both
// are measured and it is clearly slower (kSlower) for slices of that size; it comes back as soon as it is not
// slower any more. Each size class decides for itself: a link may be the faster one for small slices only.
//
// A link that is not tried first is measured by probes: small jobs that are offered to it first. One job in
// kFirstProbesEvery is one, until the link is known, and one in kProbesEvery of a link that stands behind one
// which the registry has behind it. What a probe leaves undone goes the usual way, and the link is then left
// alone, for longer each time.
//
// The time of a job is the time since its link began it or ended another one: so jobs in a queue count once,
// and a busy link costs what it costs at its rate.
//
// Links that only copy (Link::only_copies) keep their place.
//
// No clock and no thread is inside: time comes with each call. order() takes no lock; the others take one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/mutex.hpp"

namespace moonpool::engine {

struct Cost {
    double slice_ns = 0;
    double byte_ns = 0;

    double of(uint64_t slices, uint64_t bytes) const {
        return slice_ns * static_cast<double>(slices) + byte_ns * static_cast<double>(bytes);
    }
};

// Fitted to jobs, the latest ones most.
class CostFit {
   public:
    static constexpr uint64_t kJobsMin = 8;  // before it is believed

    void add(uint64_t slices, uint64_t bytes, uint64_t ns);
    bool known() const { return jobs_ >= kJobsMin; }
    uint64_t jobs() const { return jobs_; }
    Cost cost() const;

   private:
    static constexpr double kKept = 0.9;        // of what is known, with each job
    static constexpr double kAtMost = 4;        // times what was expected, which one job counts
    static constexpr double kUnitBytes = 4096;  // that weigh as much as a slice

    uint64_t jobs_ = 0;
    // Of slices (s), bytes (b) and time (t), each for a unit of its job: sums of products.
    double ss_ = 0, sb_ = 0, bb_ = 0, st_ = 0, bt_ = 0;
};

class LinkOrder {
   public:
    static constexpr size_t kLinksMax = 16;  // with more of them, all stay as they stand
    static constexpr double kSlower = 1.5;
    static constexpr uint64_t kProbeBytesMax = 256u << 10;
    static constexpr uint64_t kFirstProbesEvery = 16, kProbesEvery = 512;  // jobs
    static constexpr uint64_t kLeaveAloneNs = 10'000'000'000, kLeaveAloneNsMax = 600'000'000'000;

    // Indices of links in the order in which they are tried: four bits each, the first one lowest.
    using Packed = uint64_t;
    static constexpr Packed kAsTheyStand = 0xFEDCBA9876543210;
    static size_t at(Packed order, size_t place) {
        return place < kLinksMax ? order >> (4 * place) & 15 : place;
    }

    // only_copies: of each link, in the order of the registry.
    explicit LinkOrder(std::vector<bool> only_copies);

    // Whether there is a choice at all.
    bool chooses() const { return chooses_; }
    // For a job of that many slices and bytes.
    Packed order(uint64_t slices, uint64_t bytes) const {
        return orders_[class_of(slices, bytes)].load(std::memory_order_relaxed);
    }
    // The same, and now and then with a link in front that this job is to measure.
    Packed order_or_probe(uint64_t slices, uint64_t bytes, uint64_t now_ns);

    // That link begins a job.
    void began(size_t link, uint64_t now_ns);
    // It has ended one, all of which it has carried; slices 0: it was not all of it, and says nothing of
    // costs.
    void ended(size_t link, uint64_t slices, uint64_t bytes, uint64_t now_ns);
    // The same of a job that was timed elsewhere.
    void carried(size_t link, uint64_t slices, uint64_t bytes, uint64_t ns);
    // It has left something undone.
    void left_undone(size_t link, uint64_t now_ns);

    struct Measured {
        uint64_t jobs = 0;
        Cost cost;
    };
    Measured measured(size_t link) const;

   private:
    static constexpr std::array<uint64_t, 3> kClassBytes = {4096, 256u << 10, 4u << 20};  // of their slices
    static size_t class_of(uint64_t slices, uint64_t bytes) {
        uint64_t each = slices == 0 ? 0 : bytes / slices;
        return each <= (32u << 10) ? 0 : each <= (1u << 20) ? 1 : 2;
    }
    void add(size_t link, uint64_t slices, uint64_t bytes, uint64_t ns) REQUIRES(mutex_);
    void sort(size_t size_class) REQUIRES(mutex_);
    bool slower(size_t a, size_t b, double factor, uint64_t bytes) const REQUIRES(mutex_);

    struct State {
        CostFit fit;
        uint64_t under_way = 0;      // jobs
        uint64_t since_ns = 0;       // when the last of them began or ended
        uint64_t probed_at = 0;      // of jobs_
        uint64_t not_before_ns = 0;  // no probe
        uint64_t leave_alone_ns = kLeaveAloneNs;
    };
    const std::vector<bool> only_copies_;
    const bool chooses_;
    std::array<std::atomic<Packed>, 3> orders_;
    mutable Mutex mutex_;
    std::vector<State> states_ GUARDED_BY(mutex_);
    uint64_t jobs_ GUARDED_BY(mutex_) = 0;  // that may have been probes
};

}  // namespace moonpool::engine
