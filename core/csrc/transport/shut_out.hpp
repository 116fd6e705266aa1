// ShutOut: the engines that may not reach this one's memory any more, by their segment.
//
// A target says first whom it shuts out, and then ends what is open; a thread that begins something of a peer
// enters first, and looks then (sequentially consistent): so one of the two sees the other.
#pragma once

#include <atomic>
#include <set>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "transport/identity.hpp"

namespace moonpool::transport {

class ShutOut {
   public:
    static constexpr size_t kMax = 65536;

    Status add(const SegmentId& segment) {
        MutexLock lock(mutex_);
        if (segments_.size() >= kMax && !segments_.contains(segment)) {
            return Error{Code::kTooLarge, "this engine already shuts out " + std::to_string(kMax) +
                                              " others, the limit; admit those that have ended"};
        }
        segments_.insert(segment);
        count_.store(segments_.size());
        return success();
    }
    void remove(const SegmentId& segment) {
        MutexLock lock(mutex_);
        segments_.erase(segment);
        count_.store(segments_.size());
    }
    bool any() const { return count_.load() != 0; }
    bool has(const SegmentId& segment) const {
        if (!any()) return false;
        MutexLock lock(mutex_);
        return segments_.contains(segment);
    }

    static Error error() { return Error{Code::kAuth, "the peer has shut out this engine"}; }

   private:
    std::atomic<size_t> count_{0};
    mutable Mutex mutex_;
    std::set<SegmentId> segments_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::transport
