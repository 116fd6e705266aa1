// Staging: device memory in two halves, in which objects lie in their own order between the link and a paged
// KV cache. While one half is copied over the link, the kernel works on the other.
//
// A half goes from one stream to the next by events alone; the thread never waits. Each use is begin(), work
// queued on that stream, end():
//
//     load   copy stream:   begin(half) copy to it   end(half)
//            kernel stream: begin(half) kernel       end(half)      and so on with the next objects
//
// begin() makes the stream wait for the last end(), so no work sees a half that other work still uses. One
// thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "device/device_memory.hpp"
#include "device/event.hpp"
#include "device/stream.hpp"

namespace moonpool::device {

struct StagingOptions {
    // 0: no memory, but the events of the uses.
    uint64_t half_bytes = 32u << 20;
    // A card that has given its memory to the KV cache has little left: half as much, half of that, down to
    // this.
    uint64_t half_bytes_min = 4u << 20;
};

class Staging {
   public:
    static constexpr size_t kHalves = 2;

    // An error when not even two halves of half_bytes_min fit, with the reason of the last attempt.
    static Result<Staging> open(std::shared_ptr<const Device> device, const StagingOptions& options);
    Staging(Staging&&) noexcept = default;
    ~Staging();  // close(3 s)

    // Waits until the last uses are over, and frees the memory. kTimeout: a card that hangs keeps it. A
    // second call does nothing.
    Status close(int timeout_ms);
    // It stays allocated for ever: for work of which it is not known whether it ends.
    void leak() { memory_.leak(); }

    uint64_t half_bytes() const { return memory_.bytes() / kHalves; }
    uint64_t address(size_t half) const { return memory_.address() + half * half_bytes(); }

    const Event& last_use(size_t half) const { return last_use_[half]; }
    Status begin(size_t half, Stream& stream) { return stream.wait_for(last_use_[half]); }
    Status end(size_t half, const Stream& stream) { return last_use_[half].record(stream.handle()); }

   private:
    Staging(DeviceMemory memory, Event first, Event second);

    DeviceMemory memory_;
    std::array<Event, kHalves> last_use_;
};

}  // namespace moonpool::device
