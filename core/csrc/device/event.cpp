#include "device/event.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.hpp"

namespace moonpool::device {

namespace {

constexpr auto kPauseMin = std::chrono::microseconds(5);
constexpr auto kPauseMax = std::chrono::microseconds(100);

}  // namespace

Event::Event(std::shared_ptr<const Device> device, CuEvent* handle)
    : device_(std::move(device)), handle_(handle) {}

Result<Event> Event::create(std::shared_ptr<const Device> device) {
    OnDevice here(*device);
    if (!here) return here.error();
    CuEvent* handle = nullptr;
    Status made =
        device->check(device->driver().cuEventCreate(&handle, cu::kEventDisableTiming), "cuEventCreate");
    if (!made) return made.error();
    return Event(std::move(device), handle);
}

Event::Event(Event&& other) noexcept
    : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
    if (this != &other) {
        destroy();
        device_ = std::move(other.device_);
        handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
}

Event::~Event() { destroy(); }

void Event::destroy() {
    if (handle_ == nullptr) return;
    if (OnDevice here(*device_); here) device_->driver().cuEventDestroy(handle_);
    handle_ = nullptr;
}

Status Event::record(CuStream* stream) {
    OnDevice here(*device_);
    if (!here) return here.error();
    return device_->check(device_->driver().cuEventRecord(handle_, stream), "cuEventRecord");
}

Result<bool> Event::over() const {
    OnDevice here(*device_);
    if (!here) return here.error();
    int code = device_->driver().cuEventQuery(handle_);
    if (code == cu::kNotReady) return false;
    if (Status asked = device_->check(code, "cuEventQuery"); !asked) return asked.error();
    return true;
}

Result<bool> Event::wait(int timeout_ms) const {
    uint64_t until_ns = now_ns() + static_cast<uint64_t>(std::max(timeout_ms, 0)) * 1000000;
    for (auto pause = kPauseMin;; pause = std::min(pause * 2, kPauseMax)) {
        Result<bool> over = this->over();
        if (!over || *over) return over;
        if (now_ns() >= until_ns) return false;
        std::this_thread::sleep_for(pause);
    }
}

}  // namespace moonpool::device
