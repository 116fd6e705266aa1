#include "store/device/copy_lanes.hpp"

#include <utility>

namespace moonpool {

namespace {

// Slots are held while the pool is read or written, or a kernel waits for the engine: a node that does not
// answer has run into its own timeout before.
constexpr int kSlotTimeoutMs = 10'000;
constexpr int kAskAgainMs = 50;  // a lane that waits for its card looks this often whether to give up

}  // namespace

Result<std::unique_ptr<CopyLanes>> CopyLanes::open(std::shared_ptr<const device::Device> device,
                                                   device::PinnedRing& ring, const Options& options) {
    std::unique_ptr<CopyLanes> lanes(new CopyLanes(device, ring));
    const device::StagingOptions halves{.half_bytes = ring.slot_bytes(), .half_bytes_min = ring.slot_bytes()};
    for (uint32_t i = 0; i < options.lanes; ++i) {
        auto stream = device::Stream::create(device, device::Stream::Priority::kLowest);
        if (!stream) return stream.error();
        auto staging = device::Staging::open(device, halves);
        if (!staging) return staging.error();
        lanes->lanes_.push_back(std::unique_ptr<Lane>(new Lane{std::move(*stream), std::move(*staging)}));
    }
    for (auto& lane : lanes->lanes_) {
        Status started = lane->thread.start(options.thread_name, [&l = *lane, &all = *lanes] { all.run(l); });
        if (!started) return started.error();  // the destructor ends those that run
    }
    return lanes;
}

CopyLanes::~CopyLanes() {
    begin_close(std::chrono::steady_clock::now() + std::chrono::milliseconds(kCloseMs));
    (void)join();
}

void CopyLanes::submit(Chunk chunk) {
    {
        MutexLock lock(mutex_);
        if (!deadline_) {
            queue_.push_back(std::move(chunk));
            changed_.notify_all();  // a lane that waits for its card sleeps here, too
            return;
        }
    }
    drop({std::move(chunk)});
}

void CopyLanes::drop(std::deque<Chunk> chunks) {
    for (Chunk& chunk : chunks) {
        ChunkInFlight in{.chunk = std::move(chunk)};
        in.chunk.job->end(in, Error{Code::kClosed, "the copies between host and card are closed"});
        in.chunk.job->chunk_over();
    }
}

void CopyLanes::begin_close(std::chrono::steady_clock::time_point deadline) {
    std::deque<Chunk> dropped;
    {
        MutexLock lock(mutex_);
        if (!deadline_) deadline_ = deadline;
        dropped.swap(queue_);
        changed_.notify_all();
    }
    drop(std::move(dropped));
}

bool CopyLanes::join() {
    for (auto& lane : lanes_) lane->thread.join();
    return !stuck_;
}

void CopyLanes::run(Lane& lane) {
    size_t half = 0;  // the one whose turn is next; the other one began later
    for (;;) {
        bool busy = lane.in_flight[0] || lane.in_flight[1];
        std::optional<Chunk> chunk = next(!busy);
        if (!chunk && !busy) return;
        if (lane.in_flight[half]) end(lane, half);
        if (chunk && stuck_) {  // there is no staging memory to begin it on
            drop({std::move(*chunk)});
        } else if (chunk) {
            begin(lane, half, std::move(*chunk));
        }
        half = (half + 1) % kDepth;
    }
}

// None: there is none now; with may_wait: there is none any more.
std::optional<Chunk> CopyLanes::next(bool may_wait) {
    MutexLock lock(mutex_);
    if (may_wait) changed_.wait(lock, [&]() REQUIRES(mutex_) { return deadline_ || !queue_.empty(); });
    if (queue_.empty()) return std::nullopt;
    Chunk chunk = std::move(queue_.front());
    queue_.pop_front();
    return chunk;
}

void CopyLanes::begin(Lane& lane, size_t half, Chunk chunk) {
    lane.in_flight[half] = ChunkInFlight{std::move(chunk), {}, lane.staging.address(half), &lane.stream};
    ChunkInFlight& in = *lane.in_flight[half];
    Result<device::RingSlot> slot = ring_.take(0);
    // A lane that waits for a slot holds none: else lanes would wait for one another.
    for (size_t other = 0; !slot && other < kDepth; ++other) {
        if (other != half && lane.in_flight[other]) end(lane, other);
    }
    if (!slot) slot = wait_for_slot();
    if (!slot) {
        lane.begun[half] = slot.error();
        return;
    }
    in.slot = std::move(*slot);
    lane.begun[half] = in.chunk.job->begin(in);
    // After an error, too: what was queued before it uses the slot and the half.
    lane.recorded[half] = lane.staging.end(half, lane.stream).ok();
}

Result<device::RingSlot> CopyLanes::wait_for_slot() {
    for (int waited_ms = 0;; waited_ms += kAskAgainMs) {
        Result<device::RingSlot> slot = ring_.take(kAskAgainMs);
        if (slot || slot.error().code != Code::kTimeout) return slot;
        if (waited_ms >= kSlotTimeoutMs || must_give_up(0)) {
            return Error{Code::kTimeout,
                         "no slot of the pinned ring came back in time; gpu_ring may be larger"};
        }
    }
}

void CopyLanes::end(Lane& lane, size_t half) {
    ChunkInFlight& in = *lane.in_flight[half];
    Status waited = in.slot ? wait(lane, half) : success();
    if (waited) {
        in.slot.waited_for();
    } else if (waited.error().code == Code::kTimeout) {
        stuck_ = true;
        (void)lane.staging.close(0);  // keeps the memory: the card may still write there
    }
    std::shared_ptr<CopyJob> job = in.chunk.job;
    job->end(in, lane.begun[half].ok() ? waited : lane.begun[half]);
    lane.in_flight[half].reset();
    job->chunk_over();
}

// Without a deadline of its own: an engine whose card hangs waits as well, and a request that was told failed
// while its copies may still run would get blocks that are written to. For the same reason an event that
// could not be recorded, or asked, is recorded or asked again; only a card that is lost runs nothing more.
Status CopyLanes::wait(Lane& lane, size_t half) {
    for (;;) {
        if (!lane.recorded[half]) lane.recorded[half] = lane.staging.end(half, lane.stream).ok();
        bool asked = false;
        if (lane.recorded[half]) {
            Result<bool> over = lane.staging.last_use(half).wait(kAskAgainMs);
            if (over && *over) return success();
            asked = over.ok();
        }
        if (int code = device_->lost(); code != 0) {
            return Error{Code::kUnavailable, device_->driver().describe(code)};
        }
        if (must_give_up(asked ? 0 : kAskAgainMs)) {
            return Error{Code::kTimeout, "the card did not end its copies before this engine closed"};
        }
    }
}

bool CopyLanes::must_give_up(int pause_ms) {
    auto too_late = [&]() REQUIRES(mutex_) {
        return deadline_ && std::chrono::steady_clock::now() >= *deadline_;
    };
    MutexLock lock(mutex_);
    if (pause_ms == 0) return too_late();
    return changed_.wait_for(lock, std::chrono::milliseconds(pause_ms), too_late);
}

void CopyJob::expect(size_t chunks) {
    MutexLock lock(left_mutex_);
    left_ = chunks;
}

void CopyJob::wait_for_all() {
    MutexLock lock(left_mutex_);
    none_left_.wait(lock, [&]() REQUIRES(left_mutex_) { return left_ == 0; });
}

void CopyJob::chunk_over() {
    MutexLock lock(left_mutex_);
    if (--left_ == 0) none_left_.notify_all();
}

}  // namespace moonpool
