// CopyLanes: threads that carry chunks of copy jobs between host memory and a card. A lane is a thread with
// two streams and, where the jobs want it, two halves of staging memory of its own, so lanes share nothing
// but the queue of chunks and the ring of pinned slots:
//
//     take a chunk --> begin(): fill a slot, queue its copies --> end(): its event is over
//
// A lane begins a second chunk before it ends the first, on the other stream, so that the card copies one
// while the thread fills the other, and one crosses the link while the kernel works on the other. Chunks
// begin in the order in which they were submitted; each is ended exactly once, whatever fails: after an
// error, after begin_close(), and on a card that hangs.
//
// Where it cannot be known whether copies are over, because the card hangs at the deadline of begin_close()
// or its driver answers every question with an error, the lanes break: memory that the card may still use
// stays allocated, and each later chunk ends with that error.
//
// Threads: submit() and begin_close() on any thread, join() on one; begin() and end() of a chunk on one
// lane's thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "device/pinned_ring.hpp"
#include "device/staging.hpp"
#include "device/stream.hpp"
#include "store/device/copy_job.hpp"

namespace moonpool {

class CopyLanes {
   public:
    static constexpr int kCloseMs = 3'000;  // what a destructor waits for a card
    // How long a driver may refuse to tell whether copies are over. Those of a chunk take milliseconds, so
    // afterwards they are over unless the card hangs, too.
    static constexpr int kRefusedMs = 5'000;
    struct Options {
        uint32_t lanes = 1;
        const char* thread_name = "";        // at most 15 characters
        bool staging = true;                 // each lane has device memory for two slots
        device::RingShare* share = nullptr;  // what the chunks may hold of the ring; null: all of it
        int refused_ms = kRefusedMs;
    };
    static Result<std::unique_ptr<CopyLanes>> open(std::shared_ptr<const device::Device> device,
                                                   device::PinnedRing& ring, const Options& options);
    ~CopyLanes();  // begin_close(in kCloseMs), join()
    CopyLanes(const CopyLanes&) = delete;

    size_t lanes() const { return lanes_.size(); }
    // After begin_close(), or once the lanes are broken, the chunk ends with that error on the calling
    // thread.
    void submit(Chunk chunk) EXCLUDES(mutex_);
    // Why no chunk will be copied any more; empty: they will.
    std::string broken() const EXCLUDES(mutex_);
    // Chunks that have not begun end with kClosed; those under way that are not over at the deadline will end
    // with kTimeout. Waits for nothing.
    void begin_close(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);
    // Waits until the lanes have ended. False: the card still uses staging memory, which stays allocated.
    bool join();

   private:
    static constexpr size_t kDepth = device::Staging::kHalves;
    struct Lane {
        std::array<device::Stream, kDepth> streams;  // a half has its own
        device::Staging staging;
        std::array<std::optional<ChunkInFlight>, kDepth> in_flight{};
        std::array<Status, kDepth> begun{success(), success()};
        std::array<bool, kDepth> recorded{};  // the event behind what was queued for each half
        ServiceThread thread{};
    };

    CopyLanes(std::shared_ptr<const device::Device> device, device::PinnedRing& ring, const Options& options)
        : device_(std::move(device)), ring_(ring), share_(options.share), refused_ms_(options.refused_ms) {}
    void run(Lane& lane);
    std::optional<Chunk> next(bool may_wait) EXCLUDES(mutex_);
    void begin(Lane& lane, size_t half, Chunk chunk);
    void end(Lane& lane, size_t half);
    Result<device::RingSlot> wait_for_slot() EXCLUDES(mutex_);
    Status wait(Lane& lane, size_t half) EXCLUDES(mutex_);
    // -> over. Records the event behind the chunk if it was not yet.
    static Result<bool> ask(Lane& lane, size_t half);
    // pause_ms: how long it waits for that, 0: not at all.
    bool must_give_up(int pause_ms) EXCLUDES(mutex_);
    void become_broken(Lane& lane, const std::string& why) EXCLUDES(mutex_);
    Error why_not() const EXCLUDES(mutex_);
    // Ends a chunk that has not begun.
    static void fail(Chunk chunk, const Error& error);

    const std::shared_ptr<const device::Device> device_;
    device::PinnedRing& ring_;
    device::RingShare* const share_;
    const int refused_ms_;
    mutable Mutex mutex_;
    CondVar changed_;
    std::deque<Chunk> queue_ GUARDED_BY(mutex_);
    std::optional<std::chrono::steady_clock::time_point> deadline_
        GUARDED_BY(mutex_);  // set by begin_close()
    std::string broken_ GUARDED_BY(mutex_);
    std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace moonpool
