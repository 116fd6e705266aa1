// RegisteredParts: memory that another component has mapped read-only, pinned from its front on, part by
// part, so that a card copies from it. Pinning stops every CUDA call of the process, 0.02 to 0.05 s for each
// GiB on an H200, where other calls waited 2 ms for one of 32 MiB and 71 ms for one of 2 GiB: a part is as
// much as one call may take.
//
// A copy must lie within one part: the driver takes no range over two registrations.
//
// Threads: grow() on one, holds() on any; nothing uses the memory on a card when it is released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "device/device.hpp"

namespace moonpool::device {

class RegisteredParts {
   public:
    static constexpr uint64_t kPartBytes = 64u << 20;  // about 6 ms

    // begin: whole pages, which stay mapped until release().
    RegisteredParts(std::shared_ptr<const Device> device, const std::byte* begin, uint64_t part_bytes)
        : device_(std::move(device)), begin_(begin), part_bytes_(part_bytes) {}
    ~RegisteredParts() { (void)release(); }
    RegisteredParts(const RegisteredParts&) = delete;

    // Pins until `bytes` from the front on are. After an error those before it stay pinned.
    Status grow(uint64_t bytes) EXCLUDES(mutex_);
    uint64_t bytes() const EXCLUDES(mutex_);
    // Whether that range lies in one part.
    bool holds(uint64_t offset, uint64_t bytes) const EXCLUDES(mutex_);

    // Ends the pins. False: not all of them, because the device is lost or this is a child of fork(): the
    // memory has to stay mapped.
    bool release() EXCLUDES(mutex_);
    // They last for ever: for work of a card that does not end.
    void leak() EXCLUDES(mutex_);

   private:
    const std::shared_ptr<const Device> device_;
    const std::byte* const begin_;
    const uint64_t part_bytes_;
    mutable Mutex mutex_;
    std::vector<uint64_t> ends_ GUARDED_BY(mutex_);  // of the parts; each begins where the one before ends
};

}  // namespace moonpool::device
