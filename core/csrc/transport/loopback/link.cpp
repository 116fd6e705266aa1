#include "transport/loopback/link.hpp"

#include <algorithm>
#include <cstring>

namespace moonpool::transport::loopback {

Status Link::run(Job& job) {
    std::shared_ptr<const Regions> regions = target_->regions->all();
    const std::shared_ptr<Region>* region = nullptr;
    uint64_t held = 0;
    Tally tally(counters_);
    Visit here, there;
    for (size_t i = 0; i < job.slices.size(); ++i) {
        if (!job.is_waiting(i)) continue;
        const Slice& slice = job.slices[i];
        if (region == nullptr || !(*region)->contains(slice.remote, slice.length)) {
            region = find_region(*regions, slice.remote, slice.length);
        }
        if (region == nullptr) {
            job.fail(i, Code::kInvalidArgument,
                     "the range " + range_text(slice) + " lies in no registered region of the peer");
            continue;
        }
        for (uint64_t at = 0; at < slice.length;) {
            if (job.stopped()) return Error{Code::kClosed, "stopped"};
            if (target_->closed) return Error{Code::kUnavailable, "the peer has closed"};
            // Leave now and then, so that no thread waits long to deregister.
            if (held >= kAccessBytesMax) {
                here.end();
                there.end();
                held = 0;
            }
            uint64_t n = std::min(slice.length - at, kAccessBytesMax - held);
            Visit::Access mine = here.reach(*job.locals[i], slice.local, slice.length, at, n);
            if (mine == Visit::Access::kClosing) {
                job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
                break;
            }
            Visit::Access theirs = there.reach(**region, slice.remote, slice.length, at, n);
            if (theirs == Visit::Access::kClosing) {
                job.fail(i, Code::kInvalidArgument, "the peer deregistered the region");
                region = nullptr;
                break;
            }
            if (mine == Visit::Access::kOutside || theirs == Visit::Access::kOutside) {
                job.fail(i, Code::kProtocol, kOutsideText);
                break;
            }
            auto* local = reinterpret_cast<std::byte*>(slice.local + at);
            auto* remote = reinterpret_cast<std::byte*>(slice.remote + at);
            // Both sides may be the same engine, and the ranges one.
            if (slice.direction == Direction::kRead) {
                std::memmove(local, remote, n);
            } else {
                std::memmove(remote, local, n);
            }
            at += n;
            held += n;
        }
        if (!job.is_waiting(i)) continue;
        tally.count(slice.direction == Direction::kWrite, slice.length);
        job.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
        job.done(i);
    }
    return success();
}

}  // namespace moonpool::transport::loopback
