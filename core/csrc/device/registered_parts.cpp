#include "device/registered_parts.hpp"

#include <algorithm>
#include <utility>

namespace moonpool::device {

Status RegisteredParts::grow(uint64_t bytes) {
    OnDevice here(*device_);
    if (!here) return here.error();
    if (!device_->facts().registers_read_only) {
        return Error{Code::kInvalidArgument,
                     "the CUDA driver does not pin memory that is mapped read-only on this machine"};
    }
    for (uint64_t at = this->bytes(); at < bytes;) {
        uint64_t part = std::min(part_bytes_, bytes - at);
        Status pinned =
            device_->check(device_->driver().cuMemHostRegister(const_cast<std::byte*>(begin_ + at), part,
                                                               cu::kRegisterPortable | cu::kRegisterReadOnly),
                           "cuMemHostRegister");
        if (!pinned) return pinned;
        at += part;
        MutexLock lock(mutex_);
        ends_.push_back(at);
    }
    return success();
}

uint64_t RegisteredParts::bytes() const {
    MutexLock lock(mutex_);
    return ends_.empty() ? 0 : ends_.back();
}

bool RegisteredParts::holds(uint64_t offset, uint64_t bytes) const {
    MutexLock lock(mutex_);
    auto end = std::ranges::upper_bound(ends_, offset);
    return end != ends_.end() && bytes <= *end - offset;
}

bool RegisteredParts::release() {
    if (device_->in_child()) return false;  // where the mutex may be held for ever
    std::vector<uint64_t> ends;
    {
        MutexLock lock(mutex_);
        ends = std::exchange(ends_, {});
    }
    if (ends.empty()) return true;
    OnDevice here(*device_);
    if (!here) return false;
    bool all = true;
    uint64_t begin = 0;
    for (uint64_t end : ends) {
        all &= device_->driver().cuMemHostUnregister(const_cast<std::byte*>(begin_ + begin)) == cu::kSuccess;
        begin = end;
    }
    return all;
}

void RegisteredParts::leak() {
    MutexLock lock(mutex_);
    ends_.clear();
}

}  // namespace moonpool::device
