// Workers: threads for what may block. Foreground before background. As many threads as there is work, up to
// a maximum; idle ones end. What only copies and what waits for a peer have threads of their own, so that no
// copy waits behind a peer that stands still.
//
// Lane: what concerns one peer on such threads. It holds a few of them at most, so that a peer that stands
// still leaves the others to the rest.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

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

class Lane {
   public:
    Lane(Workers& workers, uint32_t threads_max) : state_(std::make_shared<State>(workers, threads_max)) {}

    // As of Workers; in their order within each priority.
    void post(bool background, std::function<void()> function);

   private:
    struct State {
        State(Workers& workers, uint32_t n) : workers(workers), threads_max(n) {}
        Workers& workers;
        const uint32_t threads_max;
        Mutex mutex;
        std::deque<std::function<void()>> foreground GUARDED_BY(mutex), background GUARDED_BY(mutex);
        uint32_t threads GUARDED_BY(mutex) = 0;  // of the workers', running or asked for
    };
    static void run(const std::shared_ptr<State>& state);

    std::shared_ptr<State> state_;  // outlives the lane for what was posted
};

}  // namespace moonpool::transport
