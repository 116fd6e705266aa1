// Worker: threads that run operations off the caller's thread, for callers that must not wait: an event loop,
// an engine's step. Tickets of finished operations are collected with poll(); `event_fd` becomes readable
// when there are some. Operations start in the order of submission; the queue has a maximum.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/result.hpp"

namespace moonpool {

class Worker {
   public:
    Worker(uint32_t threads, uint32_t queue_max);
    ~Worker();
    Worker(const Worker&) = delete;

    // The ticket of the operation. kTooLarge when the queue is full, kClosed after close().
    Result<uint64_t> submit(std::function<void()> operation);
    std::vector<uint64_t> poll();

    // Waits for the running operations; those that have not started are dropped. Any thread, any time: each
    // call returns when they have ended.
    void close();

    int event_fd() const { return event_.get(); }

   private:
    struct State {
        std::mutex mutex;
        std::condition_variable work;
        std::deque<std::pair<uint64_t, std::function<void()>>> queue;
        std::vector<uint64_t> done;
        bool closing = false;
    };

    void run();

    ForkGuard fork_;
    Fd event_;
    uint32_t queue_max_;
    uint64_t next_ticket_ = 1;
    std::unique_ptr<State> state_ = std::make_unique<State>();
    std::mutex closing_;  // a thread is joined once
    std::vector<std::unique_ptr<std::thread>> threads_;
};

}  // namespace moonpool
