// PinnedRing: pinned host memory in slots of one size, through which bytes go to a card and back. Small
// enough to stay in the CPU's last-level cache, so that copying into a slot costs the CPU no memory
// bandwidth.
//
//     free --take()--> taken --release--> free                        no stream has used it
//                        |
//                        '--release--> in flight --its event--> free  used_on() named a stream
//                                          '--no event--> lost        it could not be recorded
//
// Invariants: each slot is in exactly one of those states. A slot is free only when no work of a card can
// reach its bytes; one whose event cannot be recorded, because the device is lost, is never used again. The
// memory is freed only when every slot is free; otherwise close() leaves it, pinned, to the process.
//
// Any thread takes and releases. The lock is held while the events of slots in flight are asked, about 1 us
// for each that is over; a wait for a slot asks every 100 us at most.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "device/event.hpp"
#include "device/pinned_memory.hpp"
#include "device/stream.hpp"

namespace moonpool::device {

struct RingOptions {
    uint64_t slot_bytes = 4u << 20;
    uint32_t slots = 16;
    // As many as fit are taken where the system refuses that many: half, half of that, down to this.
    uint32_t slots_min = 2;
};

class PinnedRing;

// What some users of a ring may hold of it together, so that the others find slots. Outlives their slots.
class RingShare {
   public:
    explicit RingShare(uint32_t slots_max) : slots_max_(slots_max) {}
    RingShare(const RingShare&) = delete;

   private:
    friend class PinnedRing;
    const uint32_t slots_max_;
    uint32_t taken_ = 0;  // under the ring's lock
};

// A slot that is taken. Released by its destructor.
class RingSlot {
   public:
    RingSlot() = default;
    RingSlot(RingSlot&& other) noexcept;
    RingSlot& operator=(RingSlot&& other) noexcept;
    ~RingSlot() { release(); }

    explicit operator bool() const { return ring_ != nullptr; }
    std::span<std::byte> bytes() const;
    uint64_t address() const { return reinterpret_cast<uint64_t>(bytes().data()); }

    // Called before the first copy from or to the slot is queued on `stream`: once released, the slot comes
    // back when what was queued there has ended. One stream; it outlives the slot.
    void used_on(const Stream& stream) { stream_ = stream.handle(); }
    // What was queued there has ended: the slot comes back at once.
    void waited_for() { stream_ = nullptr; }
    void release();

   private:
    friend class PinnedRing;
    RingSlot(PinnedRing* ring, uint32_t number) : ring_(ring), number_(number) {}

    PinnedRing* ring_ = nullptr;
    uint32_t number_ = 0;
    CuStream* stream_ = nullptr;
};

struct RingCounts {
    uint32_t free = 0, taken = 0, in_flight = 0, lost = 0;
};

class PinnedRing {
   public:
    // An error when not even slots_min can be pinned, with the reason of the last attempt.
    static Result<std::unique_ptr<PinnedRing>> open(std::shared_ptr<const Device> device,
                                                    const RingOptions& options);
    ~PinnedRing();  // close(3 s)
    PinnedRing(const PinnedRing&) = delete;

    // Waits for a slot. kTimeout: none came back; kUnavailable: the device is lost; kClosed.
    // share: the slot counts there until it is released.
    Result<RingSlot> take(int timeout_ms, RingShare* share = nullptr) EXCLUDES(mutex_);

    // Waits until no slot is taken or in flight, and frees the memory. kTimeout: it stays in the process for
    // ever, with a sentence. A second call does nothing.
    Status close(int timeout_ms) EXCLUDES(mutex_);

    // The slots lie one after another from here on.
    uint64_t address() const { return reinterpret_cast<uint64_t>(memory_.data()); }
    uint64_t slot_bytes() const { return slot_bytes_; }
    uint32_t slots() const { return slots_; }
    bool on_node() const { return memory_.on_node(); }
    RingCounts counts() const EXCLUDES(mutex_);

   private:
    friend class RingSlot;
    PinnedRing(std::shared_ptr<const Device> device, PinnedMemory memory, uint64_t slot_bytes,
               std::vector<Event> events);

    void put_back(uint32_t number, CuStream* stream) EXCLUDES(mutex_);
    void collect() REQUIRES(mutex_);

    const std::shared_ptr<const Device> device_;
    PinnedMemory memory_;
    const uint64_t slot_bytes_;
    const uint32_t slots_;

    mutable Mutex mutex_;
    CondVar came_back_;
    std::vector<Event> events_ GUARDED_BY(mutex_);       // of each slot
    std::vector<RingShare*> shares_ GUARDED_BY(mutex_);  // of each slot that is taken, null: of none
    std::vector<uint32_t> free_ GUARDED_BY(mutex_);
    std::deque<uint32_t> in_flight_ GUARDED_BY(mutex_);
    uint32_t taken_ GUARDED_BY(mutex_) = 0;
    uint32_t lost_ GUARDED_BY(mutex_) = 0;
    bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace moonpool::device
