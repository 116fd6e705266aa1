// LivenessProbe: whether a thread's loop still turns. A caller on another thread has the loop do nothing at
// all, and waits for it a short while; a loop that is blocked, stopped or gone does not come back.
//
// At most one question is under way, whatever the number of callers: callers that come meanwhile wait for the
// same answer, and a loop that is blocked for ever collects one posted task, not one for each probe.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/mutex.hpp"

namespace moonpool {

class LivenessProbe {
   public:
    using Clock = std::chrono::steady_clock;

    // `post` makes the loop call answer(). Any thread but the loop's. False: no answer by `deadline`.
    template <class Post>
    bool ask(Post post, Clock::time_point deadline) EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        if (!asked_) {
            asked_ = true;
            lock.unlock();
            post();
            lock.lock();
        }
        uint64_t before = answers_;
        return answered_.wait_until(lock, deadline,
                                    [&]() REQUIRES(mutex_) { return !asked_ || answers_ != before; });
    }

    // Of the loop.
    void answer() EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        asked_ = false;
        ++answers_;
        answered_.notify_all();
    }

   private:
    Mutex mutex_;
    CondVar answered_;
    bool asked_ GUARDED_BY(mutex_) = false;
    uint64_t answers_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool
