// Link: one peer, as one transport reaches it; and Job, what it carries.
//
// A Job is one peer's share of a transfer. The engine offers it to the peer's links in the order of the
// registry, or in one by what they cost (engine/link_order.hpp). A link leaves every slice in one of three
// states: done; failed, when the peer refused it, so that no other path would help; or waiting, when this
// path could not: then the next link gets it. Each byte of a job is touched only while the job is inside its
// local regions (Visit), so that deregistering never frees memory in use. A link whose peer or device moves
// bytes by itself holds those regions from post() to the completion (Operation).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "transport/region.hpp"

namespace moonpool::transport {

enum class Direction : uint8_t { kRead = 0, kWrite = 1 };  // as the initiator sees it

struct Slice {
    uint64_t local = 0;
    uint64_t remote = 0;
    uint64_t length = 0;
    Direction direction = Direction::kRead;
};

enum class SliceState : uint8_t { kWaiting = 0, kDone = 1, kFailed = 2, kCancelled = 3 };

// The states are written by one thread at a time, of the link that carries the job, and may be read by others
// meanwhile.
struct Job {
    std::span<const Slice> slices;
    std::span<std::atomic<SliceState>> states;
    std::span<Region* const> locals;  // of each slice; held alive by `regions`
    std::shared_ptr<const Regions> regions;

    bool background = false;
    bool on_card = false;    // a local region is memory of a card
    bool last_path = false;  // no other link gets what this one leaves waiting
    int timeout_ms = 5000;   // without progress
    std::atomic<bool> cancelled{false};
    const std::atomic<bool>* closing = nullptr;  // of the engine
    const Job* whole = nullptr;                  // of which this one is a part

    std::atomic<uint64_t> bytes_done{0};
    std::atomic<uint64_t> progress_ns{0};  // when a byte moved last
    size_t waiting = 0;                    // slices
    Error refusal;                         // why the first failed slice failed
    std::atomic<bool> refused{false};

    bool stopped() const {
        return cancelled.load(std::memory_order_relaxed) || closing->load() ||
               (whole != nullptr && whole->stopped());
    }

    bool is_waiting(size_t i) const {
        return states[i].load(std::memory_order_relaxed) == SliceState::kWaiting;
    }
    void done(size_t i) {
        states[i].store(SliceState::kDone, std::memory_order_relaxed);
        --waiting;
    }
    void fail(size_t i, Code code, const std::string& why) {
        states[i].store(SliceState::kFailed, std::memory_order_relaxed);
        --waiting;
        if (!refused.exchange(true)) refusal = Error{code, why};
    }
};

// A part of a path that fails and carries by itself: a NIC here and one of the peer.
struct RailReport {
    std::string port;   // of this host: "mlx5_0:1"
    std::string path;   // for people: "mlx5_0:1 10.0.0.7 to mlx5_1:1 10.0.0.8"
    std::string state;  // "up", "down", "connecting", "ending"
    std::string why;    // it is not up; empty: it is
    // Since the link was made. Of a slice that was cut each piece counts.
    uint64_t bytes = 0, pieces = 0, faults = 0;
    double bytes_per_ns = 0;  // as measured of late; 0: it was not
};

// One peer over one kind of path. Thread-safe.
class Link {
   public:
    virtual ~Link() = default;
    virtual std::string path() const = 0;  // for people: "tcp 10.0.0.7:7000"
    // Of its parts, for people: what is not used, with the reasons; empty: nothing is to be said.
    virtual std::string remarks() const { return ""; }
    // Its rails, where it has such.
    virtual std::vector<RailReport> rails() const { return {}; }

    // Whether this path can move bytes to or from a peer's memory of that kind; if not, `why` (may be null)
    // says the reason in one sentence.
    virtual bool reaches(MemoryKind kind, std::string* why) const = 0;

    // Whether it is known that this path reaches nothing that the peer has registered now: then it is offered
    // no job. Never waits.
    virtual bool reaches_nothing() const { return false; }

    // Whether run() copies to and from local memory of a card by itself. To other links the engine shows a
    // slot of pinned memory in its place.
    virtual bool copies_by_card() const { return false; }

    // Whether it is for local memory of a card only: jobs without any are not offered to it.
    virtual bool is_for_cards() const { return false; }

    // Whether a CPU of this host copies, and no peer or device is waited for: then it keeps its place among
    // the links of a peer, whatever it costs.
    virtual bool only_copies() const { return false; }

    // Whether run() takes local memory that is no region: slots of pinned memory.
    virtual bool takes_slots() const { return true; }

    // Whether run() only copies, without waiting for the peer: then a small job is done at once on the thread
    // that submits it.
    virtual bool runs_on_caller(const Job& job) const = 0;

    // Carries the job on the calling thread, until no slice is waiting or this path can do no more; then the
    // error says why.
    virtual Status run(Job& job) = 0;

    // The same on threads of the transport; finished() is called once, on one of them. Links that only copy
    // leave this to the engine's copying threads (false).
    using Finished = std::function<void(std::shared_ptr<Job>, Status)>;
    virtual bool post(const std::shared_ptr<Job>& job, const Finished& finished) {
        (void)job, (void)finished;
        return false;
    }

    // Whether nothing that jobs wrote by this path before they ended can still reach the peer's memory. Never
    // waits.
    virtual bool settled() const { return true; }
    // Asks the peer to let nothing more of it in, and waits that long at most; whether it is settled.
    virtual bool settle(int timeout_ms) {
        (void)timeout_ms;
        return settled();
    }

    // The peer was closed: jobs that wait for it end soon. Idempotent.
    virtual void close() {}
};

// For links by which a CPU copies: of this process, or of the peer.
inline bool reached_by_cpu(MemoryKind kind, std::string* why) {
    if (reachable_by_cpu(kind)) return true;
    if (why != nullptr) *why = "no CPU reaches memory of the kind \"" + kind_name(kind) + "\"";
    return false;
}

inline std::string range_text(const Slice& slice) {
    char text[64];
    std::snprintf(text, sizeof(text), "0x%llx + %llu", static_cast<unsigned long long>(slice.remote),
                  static_cast<unsigned long long>(slice.length));
    return text;
}

}  // namespace moonpool::transport
