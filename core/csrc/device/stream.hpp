// Stream: an order of copies and kernels on a device, which run one after another and apart from those of
// other streams. What was queued may run at any later time: only an Event tells that it is over.
//
// Streams here do not wait for the default stream (NON_BLOCKING). Kernels go to a stream of the lowest
// priority, so that blocks of an engine's kernels are scheduled before ours.
//
// Host memory that is copied has to be pinned. One thread at a time queues on a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/device.hpp"
#include "device/event.hpp"

namespace moonpool::device {

struct Copy {
    uint64_t to = 0, from = 0;  // addresses of a device or of pinned host memory
    uint64_t bytes = 0;
};

// When the sources of a batch of copies may be read.
enum class SourceOrder : int {
    kStream = 1,  // when the stream gets there
    kAny = 3,     // at any time from the call on, before what was queued earlier: for sources that no stream
                  // writes and that stay as they are, such as committed objects of an arena
};

class Stream {
   public:
    enum class Priority { kDefault, kLowest };

    static Result<Stream> create(std::shared_ptr<const Device> device, Priority priority);
    Stream(Stream&& other) noexcept;
    Stream& operator=(Stream&& other) noexcept;
    ~Stream();  // what was queued still runs

    // What is queued from now on starts after the event is over; the thread does not wait.
    Status wait_for(const Event& event);

    Status copy(const Copy& copy);
    // All of them, in no order among themselves. One call of the driver where it has batches (CUDA 12.8), one
    // for each copy otherwise. After an error some may run all the same.
    Status copy(std::span<const Copy> copies, SourceOrder order);

    CuStream* handle() const { return handle_; }
    const Device& device() const { return *device_; }

   private:
    Stream(std::shared_ptr<const Device> device, CuStream* handle);
    void destroy();

    std::shared_ptr<const Device> device_;
    CuStream* handle_ = nullptr;
};

}  // namespace moonpool::device
