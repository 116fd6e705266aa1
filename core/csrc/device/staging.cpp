#include "device/staging.hpp"

#include <string>
#include <utility>

namespace moonpool::device {

namespace {

constexpr int kLastUseTimeoutMs = 3000;

}  // namespace

Staging::Staging(DeviceMemory memory, Event first, Event second)
    : memory_(std::move(memory)), last_use_{std::move(first), std::move(second)} {}

Result<Staging> Staging::open(std::shared_ptr<const Device> device, const StagingOptions& options) {
    Result<Event> first = Event::create(device), second = Event::create(device);
    if (!first) return first.error();
    if (!second) return second.error();
    if (options.half_bytes == 0) return Staging(DeviceMemory(), std::move(*first), std::move(*second));
    for (uint64_t bytes = options.half_bytes;; bytes /= 2) {
        Result<DeviceMemory> memory = DeviceMemory::allocate(device, kHalves * bytes);
        if (memory) return Staging(std::move(*memory), std::move(*first), std::move(*second));
        if (device->lost() != 0 || bytes / 2 < options.half_bytes_min) {
            return Error{memory.error().code, "no device memory of 2 x " + std::to_string(bytes) +
                                                  " bytes: " + memory.error().text};
        }
    }
}

Staging::~Staging() { (void)close(kLastUseTimeoutMs); }

Status Staging::close(int timeout_ms) {
    if (memory_.bytes() == 0) return success();
    for (const Event& event : last_use_) {
        Result<bool> over = event.wait(timeout_ms);
        if (!over) over = event.wait(timeout_ms);  // a question that failed once says nothing
        if (over && *over) continue;
        uint64_t bytes = memory_.bytes();
        memory_.leak();
        if (!over) return over.error();
        return Error{Code::kTimeout, "the CUDA device still uses the staging buffer: its " +
                                         std::to_string(bytes) + " bytes are kept"};
    }
    memory_ = DeviceMemory();
    return success();
}

}  // namespace moonpool::device
