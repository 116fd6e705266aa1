#include "device/pinned_ring.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace moonpool::device {

namespace {

constexpr auto kAskAgain = std::chrono::microseconds(100);
constexpr int kCloseTimeoutMs = 3000;

auto deadline_in(int timeout_ms) {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(std::max(timeout_ms, 0));
}

}  // namespace

RingSlot::RingSlot(RingSlot&& other) noexcept
    : ring_(std::exchange(other.ring_, nullptr)),
      number_(other.number_),
      stream_(std::exchange(other.stream_, nullptr)) {}

RingSlot& RingSlot::operator=(RingSlot&& other) noexcept {
    if (this != &other) {
        release();
        ring_ = std::exchange(other.ring_, nullptr);
        number_ = other.number_;
        stream_ = std::exchange(other.stream_, nullptr);
    }
    return *this;
}

std::span<std::byte> RingSlot::bytes() const {
    return {ring_->memory_.data() + number_ * ring_->slot_bytes_, ring_->slot_bytes_};
}

void RingSlot::release() {
    if (ring_ != nullptr) std::exchange(ring_, nullptr)->put_back(number_, stream_);
    stream_ = nullptr;
}

Result<std::unique_ptr<PinnedRing>> PinnedRing::open(std::shared_ptr<const Device> device,
                                                     const RingOptions& options) {
    uint32_t slots = std::max(options.slots, 1u);
    for (;; slots /= 2) {
        Result<PinnedMemory> memory = PinnedMemory::allocate(device, slots * options.slot_bytes);
        if (memory) {
            std::vector<Event> events;
            for (uint32_t i = 0; i < slots; ++i) {
                Result<Event> event = Event::create(device);
                if (!event) return event.error();
                events.push_back(std::move(*event));
            }
            return std::unique_ptr<PinnedRing>(
                new PinnedRing(std::move(device), std::move(*memory), options.slot_bytes, std::move(events)));
        }
        Error& error = memory.error();
        if (device->lost() != 0 || slots / 2 < std::max(options.slots_min, 1u)) {
            return Error{error.code, "no pinned memory of " + std::to_string(slots) + " x " +
                                         std::to_string(options.slot_bytes) + " bytes: " + error.text};
        }
    }
}

PinnedRing::PinnedRing(std::shared_ptr<const Device> device, PinnedMemory memory, uint64_t slot_bytes,
                       std::vector<Event> events)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      slot_bytes_(slot_bytes),
      slots_(static_cast<uint32_t>(events.size())),
      events_(std::move(events)),
      shares_(slots_, nullptr) {
    for (uint32_t i = slots_; i > 0; --i) free_.push_back(i - 1);
}

PinnedRing::~PinnedRing() { (void)close(kCloseTimeoutMs); }

Result<RingSlot> PinnedRing::take(int timeout_ms, RingShare* share) {
    auto until = deadline_in(timeout_ms);
    auto available = [&]() REQUIRES(mutex_) {
        return !free_.empty() && (share == nullptr || share->taken_ < share->slots_max_);
    };
    MutexLock lock(mutex_);
    for (;;) {
        if (closed_) return Error{Code::kClosed, "the pinned ring was closed"};
        collect();
        // Before the free ones: a device that is lost takes nothing more.
        if (int code = device_->lost(); code != 0) {
            return Error{Code::kUnavailable, "the CUDA device is lost: " + device_->driver().describe(code)};
        }
        if (available()) break;
        if (std::chrono::steady_clock::now() >= until) {
            return Error{Code::kTimeout,
                         "no slot of the pinned ring came back in " + std::to_string(timeout_ms) + " ms"};
        }
        came_back_.wait_for(lock, kAskAgain, [&]() REQUIRES(mutex_) { return available() || closed_; });
    }
    uint32_t number = free_.back();
    free_.pop_back();
    ++taken_;
    shares_[number] = share;
    if (share != nullptr) ++share->taken_;
    return RingSlot(this, number);
}

void PinnedRing::put_back(uint32_t number, CuStream* stream) {
    MutexLock lock(mutex_);
    --taken_;
    if (RingShare* share = std::exchange(shares_[number], nullptr); share != nullptr) --share->taken_;
    if (stream == nullptr) {
        free_.push_back(number);
    } else if (events_[number].record(stream)) {
        in_flight_.push_back(number);
    } else {
        ++lost_;
    }
    came_back_.notify_all();  // which of the waiting threads may have it depends on their shares
}

// Slots of one stream come back in order, those of several streams in any.
void PinnedRing::collect() {
    for (size_t i = 0; i < in_flight_.size();) {
        uint32_t number = in_flight_[i];
        Result<bool> over = events_[number].over();
        // A question that failed says nothing and is asked again, unless the device is lost.
        if (over ? !*over : device_->lost() == 0) {
            ++i;
            continue;
        }
        if (over) {
            free_.push_back(number);
        } else {
            ++lost_;
        }
        in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

Status PinnedRing::close(int timeout_ms) {
    if (device_->in_child()) return success();  // where the mutex may be held for ever
    auto until = deadline_in(timeout_ms);
    MutexLock lock(mutex_);
    if (std::exchange(closed_, true)) return success();
    came_back_.notify_all();
    for (;;) {
        collect();
        if (free_.size() == slots_) break;
        bool hopeless = taken_ == 0 && in_flight_.empty();  // what is left is lost
        if (hopeless || std::chrono::steady_clock::now() >= until) {
            memory_.leak();
            return Error{hopeless ? Code::kUnavailable : Code::kTimeout,
                         std::to_string(slots_ - free_.size()) + " of " + std::to_string(slots_) +
                             " slots of the pinned ring did not come back: their memory stays pinned"};
        }
        came_back_.wait_for(lock, kAskAgain, [&]() REQUIRES(mutex_) { return free_.size() == slots_; });
    }
    memory_ = PinnedMemory();
    return success();
}

RingCounts PinnedRing::counts() const {
    MutexLock lock(mutex_);
    return {.free = static_cast<uint32_t>(free_.size()),
            .taken = taken_,
            .in_flight = static_cast<uint32_t>(in_flight_.size()),
            .lost = lost_};
}

}  // namespace moonpool::device
