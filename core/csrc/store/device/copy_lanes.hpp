// CopyLanes: threads that carry chunks of copy jobs between host memory and a card. A lane is a thread with a
// stream and two halves of staging memory of its own, so lanes share nothing but the queue of chunks and the
// ring of pinned slots:
//
//     take a chunk --> begin(): fill a slot, queue its copies --> end(): its event is over
//
// A lane begins a second chunk before it ends the first, so that the card copies one while the thread fills
// the other. Chunks begin in the order in which they were submitted; each is ended exactly once, whatever
// fails: after an error, after begin_close(), and on a card that hangs.
//
// Threads: submit() and begin_close() on any thread, join() on one; begin() and end() of a chunk on one
// lane's thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "device/pinned_ring.hpp"
#include "device/staging.hpp"
#include "device/stream.hpp"

namespace moonpool {

class CopyJob;

// Objects [begin, end) of a job: what fits one slot of the ring and one half of the staging memory.
struct Chunk {
    std::shared_ptr<CopyJob> job;
    uint32_t begin = 0, end = 0;
};

// What a chunk has while it is under way.
struct ChunkInFlight {
    Chunk chunk;
    device::RingSlot slot{};
    uint64_t staged = 0;               // address of its half of the staging memory
    device::Stream* stream = nullptr;  // of its lane
};

class CopyJob {
   public:
    virtual ~CopyJob() = default;
    // chunks: how many will be submitted. Before the first is.
    void expect(size_t chunks) EXCLUDES(left_mutex_);
    // Until each of them has ended, and given its slot back.
    void wait_for_all() EXCLUDES(left_mutex_);

    // Fills in.slot or queues what fills it, and queues the copies on in.stream. After an error the chunk has
    // failed; what was queued is waited for all the same.
    virtual Status begin(ChunkInFlight& in) = 0;
    // The chunk is over: nothing reads or writes its memory any more, but after kTimeout, when the card did
    // not end its copies before the lanes were closed.
    virtual void end(ChunkInFlight& in, const Status& status) = 0;

   private:
    friend class CopyLanes;
    void chunk_over() EXCLUDES(left_mutex_);

    Mutex left_mutex_;
    CondVar none_left_;
    size_t left_ GUARDED_BY(left_mutex_) = 0;
};

class CopyLanes {
   public:
    static constexpr int kCloseMs = 3'000;  // what a destructor waits for a card
    struct Options {
        uint32_t lanes = 1;
        const char* thread_name = "";  // at most 15 characters
    };
    static Result<std::unique_ptr<CopyLanes>> open(std::shared_ptr<const device::Device> device,
                                                   device::PinnedRing& ring, const Options& options);
    ~CopyLanes();  // begin_close(in kCloseMs), join()
    CopyLanes(const CopyLanes&) = delete;

    size_t lanes() const { return lanes_.size(); }
    // After begin_close() the chunk ends with kClosed, on the calling thread.
    void submit(Chunk chunk) EXCLUDES(mutex_);
    // Chunks that have not begun end with kClosed; those under way that are not over at the deadline will end
    // with kTimeout. Waits for nothing.
    void begin_close(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);
    // Waits until the lanes have ended. False: the card still uses staging memory, which stays allocated.
    bool join();

   private:
    static constexpr size_t kDepth = device::Staging::kHalves;
    struct Lane {
        device::Stream stream;
        device::Staging staging;
        std::array<std::optional<ChunkInFlight>, kDepth> in_flight{};
        std::array<Status, kDepth> begun{success(), success()};
        std::array<bool, kDepth> recorded{};  // the event behind what was queued for each half
        ServiceThread thread{};
    };

    CopyLanes(std::shared_ptr<const device::Device> device, device::PinnedRing& ring)
        : device_(std::move(device)), ring_(ring) {}
    void run(Lane& lane);
    std::optional<Chunk> next(bool may_wait) EXCLUDES(mutex_);
    void begin(Lane& lane, size_t half, Chunk chunk);
    void end(Lane& lane, size_t half);
    Result<device::RingSlot> wait_for_slot() EXCLUDES(mutex_);
    Status wait(Lane& lane, size_t half) EXCLUDES(mutex_);
    // pause_ms: how long it waits for that, 0: not at all.
    bool must_give_up(int pause_ms) EXCLUDES(mutex_);
    static void drop(std::deque<Chunk> chunks);

    const std::shared_ptr<const device::Device> device_;
    device::PinnedRing& ring_;
    Mutex mutex_;
    CondVar changed_;
    std::deque<Chunk> queue_ GUARDED_BY(mutex_);
    std::optional<std::chrono::steady_clock::time_point> deadline_
        GUARDED_BY(mutex_);  // set by begin_close()
    std::atomic<bool> stuck_{false};
    std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace moonpool
