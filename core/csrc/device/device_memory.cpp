#include "device/device_memory.hpp"

#include <utility>

namespace moonpool::device {

Result<DeviceMemory> DeviceMemory::allocate(std::shared_ptr<const Device> device, uint64_t bytes) {
    OnDevice here(*device);
    if (!here) return here.error();
    DeviceMemory memory;
    Status made = device->check(device->driver().cuMemAlloc(&memory.address_, bytes), "cuMemAlloc");
    if (!made) return made.error();
    memory.bytes_ = bytes;
    memory.device_ = std::move(device);
    return memory;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(std::move(other.device_)),
      address_(std::exchange(other.address_, 0)),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    if (this != &other) {
        free();
        device_ = std::move(other.device_);
        address_ = std::exchange(other.address_, 0);
        bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
}

DeviceMemory::~DeviceMemory() { free(); }

void DeviceMemory::free() {
    if (bytes_ == 0) return;
    if (OnDevice here(*device_); here) device_->driver().cuMemFree(address_);
    address_ = bytes_ = 0;
}

}  // namespace moonpool::device
