// Event: a point in the work of a stream. It is over once all that was queued on the stream before record()
// has ended; until then memory that this work reads may not be written, and memory that it writes may not be
// read. An event that was never recorded is over.
//
// Waiting is asking again and again, with pauses that grow from 5 to 100 us: the driver's own wait has no
// deadline, and a card may hang. One thread at a time records; any thread asks.
#pragma once

#include <memory>

#include "device/device.hpp"

namespace moonpool::device {

class Event {
   public:
    static Result<Event> create(std::shared_ptr<const Device> device);
    Event(Event&& other) noexcept;
    Event& operator=(Event&& other) noexcept;
    ~Event();

    // stream: one of ours (Stream::handle()) or of an engine.
    Status record(CuStream* stream);
    // -> over. An error says that the device is lost, or that the question failed.
    Result<bool> over() const;
    // -> over; false when timeout_ms passed before. 0: asks once.
    Result<bool> wait(int timeout_ms) const;

    CuEvent* handle() const { return handle_; }

   private:
    Event(std::shared_ptr<const Device> device, CuEvent* handle);
    void destroy();

    std::shared_ptr<const Device> device_;
    CuEvent* handle_ = nullptr;
};

}  // namespace moonpool::device
