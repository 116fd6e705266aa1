#include "device/stream.hpp"

#include <utility>
#include <vector>

namespace moonpool::device {

Stream::Stream(std::shared_ptr<const Device> device, CuStream* handle)
    : device_(std::move(device)), handle_(handle) {}

Result<Stream> Stream::create(std::shared_ptr<const Device> device, Priority priority) {
    OnDevice here(*device);
    if (!here) return here.error();
    const Driver& driver = device->driver();
    int least = 0, greatest = 0;  // 0 is the default, smaller numbers run first
    if (priority == Priority::kLowest &&
        driver.cuCtxGetStreamPriorityRange(&least, &greatest) != cu::kSuccess) {
        least = 0;
    }
    CuStream* handle = nullptr;
    Status made = device->check(driver.cuStreamCreateWithPriority(&handle, cu::kStreamNonBlocking, least),
                                "cuStreamCreateWithPriority");
    if (!made) return made.error();
    return Stream(std::move(device), handle);
}

Stream::Stream(Stream&& other) noexcept
    : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, nullptr)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
    if (this != &other) {
        destroy();
        device_ = std::move(other.device_);
        handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
}

Stream::~Stream() { destroy(); }

void Stream::destroy() {
    if (handle_ == nullptr) return;
    if (OnDevice here(*device_); here) device_->driver().cuStreamDestroy(handle_);
    handle_ = nullptr;
}

Status Stream::wait_for(const Event& event) {
    OnDevice here(*device_);
    if (!here) return here.error();
    return device_->check(device_->driver().cuStreamWaitEvent(handle_, event.handle(), 0),
                          "cuStreamWaitEvent");
}

Status Stream::copy(const Copy& copy) {
    OnDevice here(*device_);
    if (!here) return here.error();
    if (copy.bytes == 0) return success();
    return device_->check(device_->driver().cuMemcpyAsync(copy.to, copy.from, copy.bytes, handle_),
                          "cuMemcpyAsync");
}

Status Stream::copy(std::span<const Copy> copies, SourceOrder order) {
    if (copies.empty()) return success();
    if (copies.size() == 1 || !device_->driver().has_batch_copies()) {
        for (const Copy& each : copies) {
            if (Status queued = copy(each); !queued) return queued;
        }
        return success();
    }
    OnDevice here(*device_);
    if (!here) return here.error();
    std::vector<uint64_t> to, from;
    std::vector<size_t> bytes;
    to.reserve(copies.size());
    from.reserve(copies.size());
    bytes.reserve(copies.size());
    for (const Copy& each : copies) {
        if (each.bytes == 0) continue;  // the driver refuses the whole batch for one
        to.push_back(each.to);
        from.push_back(each.from);
        bytes.push_back(each.bytes);
    }
    if (bytes.empty()) return success();
    CuCopyAttributes attributes{.source_order = static_cast<int>(order), .source = {}, .target = {}};
    size_t begin = 0, failed = 0;
    return device_->check(
        device_->driver().cuMemcpyBatchAsync(to.data(), from.data(), bytes.data(), bytes.size(), &attributes,
                                             &begin, 1, &failed, handle_),
        "cuMemcpyBatchAsync");
}

}  // namespace moonpool::device
