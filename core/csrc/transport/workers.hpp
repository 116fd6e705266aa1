// Workers: threads for what may block: copies of transfers that no caller waits for on the spot, dialling,
// the next path of a failed slice. Foreground before background. As many threads as there is work, up to a
// maximum; idle ones end.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>

#include "base/fork.hpp"
#include "base/mutex.hpp"

namespace moonpool::transport {

class Workers {
   public:
    explicit Workers(uint32_t threads_max) : threads_max_(threads_max) {}
    ~Workers() { (void)stop(std::chrono::steady_clock::time_point::max()); }
    Workers(const Workers&) = delete;

    // Runs it on a thread; at once on the caller's own after stop(), or when the host allows no thread at
    // all, so that no function is lost.
    void post(bool background, std::function<void()> function);
    // Waits for all that was posted, until `end` at most; whether it is over. Idempotent.
    bool stop(std::chrono::steady_clock::time_point end);

   private:
    void run();
    bool background_may_start() const REQUIRES(mutex_);

    ForkGuard fork_;
    uint32_t threads_max_;
    Mutex mutex_;
    CondVar work_, ended_;
    std::deque<std::function<void()>> foreground_ GUARDED_BY(mutex_), background_ GUARDED_BY(mutex_);
    uint32_t idle_ GUARDED_BY(mutex_) = 0, threads_ GUARDED_BY(mutex_) = 0;
    uint32_t busy_background_ GUARDED_BY(mutex_) = 0;
    bool stopping_ GUARDED_BY(mutex_) = false;
};

}  // namespace moonpool::transport
