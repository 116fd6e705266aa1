#include "transport/cufile/link.hpp"

#include <algorithm>
#include <cstring>

#include "base/clock.hpp"
#include "device/device.hpp"

namespace moonpool::transport::cufile {

namespace {

constexpr uint64_t kCallBytesMax = 16u << 20;  // between two looks at whether the job is stopped

}  // namespace

Link::~Link() {
    MutexLock lock(mutex_);
    if (handle_ != nullptr) library_.cuFileHandleDeregister(handle_);
}

bool Link::reaches(MemoryKind kind, std::string* why) const {
    if (kind == MemoryKind::kFile) return true;
    if (why != nullptr) *why = "it moves the bytes of files only";
    return false;
}

Result<void*> Link::handle() {
    MutexLock lock(mutex_);
    if (handle_ != nullptr) return handle_;
    if (Status open = library_.open_driver(); !open) return open.error();
    Descriptor descriptor;
    descriptor.file.fd = file_->blocks().fd();
    void* made = nullptr;
    if (CallError failed = library_.cuFileHandleRegister(&made, &descriptor); failed.code != 0) {
        return Error{Code::kUnavailable,
                     "GPUDirect Storage does not take the file: error " + std::to_string(failed.code)};
    }
    handle_ = made;
    return made;
}

Status Link::run(Job& job) {
    Status first = success();
    Tally tally(counters_);
    for (size_t i = 0; i < job.slices.size(); ++i) {
        const Slice& slice = job.slices[i];
        if (!job.is_waiting(i) || !job.locals[i]->on_card()) continue;
        if (job.stopped()) return Error{Code::kClosed, "stopped"};
        const bool write = slice.direction == Direction::kWrite;
        // What would fail, the next link says in its words. So goes the edge of a write: GPUDirect Storage
        // writes the rest of its block, too, which may be a neighbour's.
        const uint64_t block = file_->block_bytes();
        bool inside = slice.length <= file_->length() && slice.remote <= file_->length() - slice.length;
        bool edges = slice.remote % block != 0 || slice.length % block != 0;
        if (!inside || (write && (edges || !file_->read_only().empty()))) continue;
        Result<void*> handle = this->handle();
        if (!handle) return handle.error();
        if (Status moved = move(job, slice, *job.locals[i], *handle); !moved) {
            if (first) first = std::move(moved);
            continue;
        }
        job.progress_ns.store(now_ns(), std::memory_order_relaxed);
        job.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
        tally.count(write, slice.length);
        job.done(i);
    }
    return first;
}

Status Link::move(Job& job, const Slice& slice, Region& local, void* handle) {
    if (!local.contains(slice.local, slice.length)) return Error{Code::kProtocol, kOutsideText};
    device::OnDevice on(*local.card->device());
    if (!on) return on.error();
    Operation operation(job.regions);
    if (!operation.hold(local)) return Error{Code::kInvalidArgument, "the local region was deregistered"};
    for (uint64_t at = 0; at < slice.length;) {
        if (job.stopped() || closed_) return Error{Code::kClosed, "stopped"};
        size_t bytes = std::min(slice.length - at, kCallBytesMax);
        auto* base = reinterpret_cast<void*>(local.address);
        auto in_memory = static_cast<off_t>(slice.local - local.address + at);
        auto in_file = static_cast<off_t>(slice.remote + at);
        errno = 0;
        ssize_t n = slice.direction == Direction::kWrite
                        ? library_.cuFileWrite(handle, base, bytes, in_file, in_memory)
                        : library_.cuFileRead(handle, base, bytes, in_file, in_memory);
        if (n == -1) return Error{Code::kOs, std::strerror(errno)};
        if (n <= 0) return Error{Code::kUnavailable, "GPUDirect Storage failed with " + std::to_string(-n)};
        at += static_cast<uint64_t>(n);
        job.progress_ns.store(now_ns(), std::memory_order_relaxed);
    }
    return success();
}

}  // namespace moonpool::transport::cufile
