// DeviceMemory: one allocation on a card, freed by its destructor. Freeing waits for the whole card, so the
// owner first makes sure that no work of a stream uses the memory any more; where the card hangs it calls
// leak() instead.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.hpp"

namespace moonpool::device {

class DeviceMemory {
   public:
    static Result<DeviceMemory> allocate(std::shared_ptr<const Device> device, uint64_t bytes);
    DeviceMemory() = default;
    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;
    ~DeviceMemory();

    uint64_t address() const { return address_; }
    uint64_t bytes() const { return bytes_; }
    void leak() { address_ = bytes_ = 0; }

   private:
    void free();

    std::shared_ptr<const Device> device_;
    uint64_t address_ = 0, bytes_ = 0;
};

}  // namespace moonpool::device
