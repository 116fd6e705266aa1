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
    std::unique_ptr<CopyLanes> lanes(new CopyLanes(device, ring, options));
    uint64_t half = options.staging ? ring.slot_bytes() : 0;
    const device::StagingOptions halves{.half_bytes = half, .half_bytes_min = half};
    for (uint32_t i = 0; i < options.lanes; ++i) {
        auto first = device::Stream::create(device, device::Stream::Priority::kLowest);
        auto second = device::Stream::create(device, device::Stream::Priority::kLowest);
        if (!first) return first.error();
        if (!second) return second.error();
        auto staging = device::Staging::open(device, halves);
        if (!staging) return staging.error();
        lanes->lanes_.push_back(
            std::unique_ptr<Lane>(new Lane{{std::move(*first), std::move(*second)}, std::move(*staging)}));
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
        if (!deadline_ && broken_.empty()) {
            queue_.push_back(std::move(chunk));
            changed_.notify_all();  // a lane that waits for its card sleeps here, too
            return;
        }
    }
    fail(std::move(chunk), why_not());
}

std::string CopyLanes::broken() const {
    MutexLock lock(mutex_);
    return broken_;
}

Error CopyLanes::why_not() const {
    std::string why = broken();
    if (!why.empty()) return {Code::kUnavailable, why};
    return {Code::kClosed, "the copies between host and card are closed"};
}

void CopyLanes::fail(Chunk chunk, const Error& error) {
    CopyJob& job = chunk.job();
    job.end(ChunkInFlight{.chunk = std::move(chunk)}, error);
}

void CopyLanes::begin_close(std::chrono::steady_clock::time_point deadline) {
    std::deque<Chunk> dropped;
    {
        MutexLock lock(mutex_);
        if (!deadline_) deadline_ = deadline;
        dropped.swap(queue_);
        changed_.notify_all();
    }
    for (Chunk& chunk : dropped) fail(std::move(chunk), why_not());
}

bool CopyLanes::join() {
    for (auto& lane : lanes_) lane->thread.join();
    return broken().empty();
}

void CopyLanes::run(Lane& lane) {
    size_t half = 0;  // the one whose turn is next; the other one began later
    for (;;) {
        bool busy = lane.in_flight[0] || lane.in_flight[1];
        std::optional<Chunk> chunk = next(!busy);
        if (!chunk && !busy) return;
        if (lane.in_flight[half]) end(lane, half);
        if (chunk) begin(lane, half, std::move(*chunk));
        half = (half + 1) % kDepth;
    }
}

// None: there is none now; with may_wait: there is none any more.
std::optional<Chunk> CopyLanes::next(bool may_wait) {
    MutexLock lock(mutex_);
    if (may_wait) changed_.wait(lock, [&]() REQUIRES(mutex_) { return deadline_ || !queue_.empty(); });
    if (queue_.empty()) return std::nullopt;
    std::optional<Chunk> chunk(std::move(queue_.front()));
    queue_.pop_front();
    return chunk;
}

void CopyLanes::begin(Lane& lane, size_t half, Chunk chunk) {
    Result<device::RingSlot> slot = ring_.take(0, share_);
    // A lane that waits for a slot holds none: else lanes would wait for one another.
    for (size_t other = 0; !slot && other < kDepth; ++other) {
        if (lane.in_flight[other]) end(lane, other);
    }
    if (!slot) slot = wait_for_slot();
    if (!slot) return fail(std::move(chunk), slot.error());
    // Meanwhile the lane may have lost its staging memory.
    if (!broken().empty()) return fail(std::move(chunk), why_not());
    ChunkInFlight& in = lane.in_flight[half].emplace(ChunkInFlight{.chunk = std::move(chunk),
                                                                   .slot = std::move(*slot),
                                                                   .staged = lane.staging.address(half),
                                                                   .stream = &lane.streams[half]});
    lane.begun[half] = in.chunk.job().begin(in);
    // After an error, too: what was queued before it uses the slot and the half.
    lane.recorded[half] = lane.staging.end(half, lane.streams[half]).ok();
}

Result<device::RingSlot> CopyLanes::wait_for_slot() {
    for (int waited_ms = 0;; waited_ms += kAskAgainMs) {
        Result<device::RingSlot> slot = ring_.take(kAskAgainMs, share_);
        if (slot || slot.error().code != Code::kTimeout) return slot;
        if (waited_ms >= kSlotTimeoutMs || must_give_up(0)) {
            return Error{Code::kTimeout,
                         "no slot of the pinned ring came back in time; gpu_ring may be larger"};
        }
    }
}

void CopyLanes::end(Lane& lane, size_t half) {
    Status waited = wait(lane, half);
    const bool unknown = !waited && waited.error().code == Code::kTimeout;
    ChunkInFlight in = std::move(*lane.in_flight[half]);
    lane.in_flight[half].reset();
    if (waited) {
        in.slot.waited_for();
    } else if (unknown) {
        become_broken(lane, waited.error().text);
    }
    CopyJob& job = in.chunk.job();
    job.end(std::move(in), unknown || lane.begun[half].ok() ? waited : lane.begun[half]);
}

void CopyLanes::become_broken(Lane& lane, const std::string& why) {
    lane.staging.leak();  // the card may still write there
    std::deque<Chunk> dropped;
    {
        MutexLock lock(mutex_);
        if (broken_.empty()) broken_ = why;
        dropped.swap(queue_);
    }
    for (Chunk& chunk : dropped) fail(std::move(chunk), why_not());
}

// A card that hangs has no deadline here: an engine whose card hangs waits as well, and a request that was
// told failed while its copies may still run would get blocks that are written to. A driver that answers with
// errors, of which none says that the card is lost, has one: it would keep the request for ever though the
// copies are over. What it refuses once or twice is asked again.
Status CopyLanes::wait(Lane& lane, size_t half) {
    using std::chrono::steady_clock;
    auto refused_until = steady_clock::now() + std::chrono::milliseconds(refused_ms_);
    for (;;) {
        Result<bool> over = ask(lane, half);
        if (over && *over) return success();
        if (int code = device_->lost(); code != 0) {
            return Error{Code::kUnavailable, device_->driver().describe(code)};
        }
        if (over) {
            refused_until = steady_clock::now() + std::chrono::milliseconds(refused_ms_);
        } else if (steady_clock::now() >= refused_until) {
            return Error{Code::kTimeout,
                         "the CUDA driver does not say whether copies are over: " + over.error().text};
        }
        if (must_give_up(over ? 0 : kAskAgainMs)) {
            return Error{Code::kTimeout, "the card did not end its copies before this engine closed"};
        }
    }
}

Result<bool> CopyLanes::ask(Lane& lane, size_t half) {
    if (!lane.recorded[half]) {
        if (Status again = lane.staging.end(half, lane.streams[half]); !again) return again.error();
        lane.recorded[half] = true;
    }
    return lane.staging.last_use(half).wait(kAskAgainMs);
}

bool CopyLanes::must_give_up(int pause_ms) {
    auto too_late = [&]() REQUIRES(mutex_) {
        return deadline_ && std::chrono::steady_clock::now() >= *deadline_;
    };
    MutexLock lock(mutex_);
    if (pause_ms == 0) return too_late();
    return changed_.wait_for(lock, std::chrono::milliseconds(pause_ms), too_late);
}

}  // namespace moonpool
