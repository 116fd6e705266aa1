// Worker: threads that run operations off the caller's thread, for callers that must not wait: an event loop,
// an engine's step. Tickets of finished operations are collected with poll(); `event_fd` becomes readable
// when there are some. Operations start in the order of submission; the queue has a maximum.
//
// An operation is finished when no copy of its Running is left: one that goes on elsewhere, on threads of its
// own, keeps a copy there, and the worker's thread starts the next one meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"

namespace moonpool {

class Worker {
   public:
    Worker(uint32_t threads, uint32_t queue_max);
    ~Worker();
    Worker(const Worker&) = delete;

    using Running = std::shared_ptr<const void>;
    // The ticket of the operation. kTooLarge when the queue is full, kClosed after close().
    Result<uint64_t> submit(std::function<void(Running)> operation);
    Result<uint64_t> submit(std::function<void()> operation) {
        return submit([run = std::move(operation)](const Running&) { run(); });
    }
    std::vector<uint64_t> poll();

    // Waits for the running operations; those that have not started are dropped. Any thread, any time: each
    // call returns when they have ended.
    void close();

    int event_fd() const { return event_.get(); }

   private:
    struct State {
        Mutex mutex;
        CondVar work, none_running;
        std::deque<std::pair<uint64_t, std::function<void(Running)>>> queue GUARDED_BY(mutex);
        size_t running GUARDED_BY(mutex) = 0;
        std::vector<uint64_t> done GUARDED_BY(mutex);
        bool closing GUARDED_BY(mutex) = false;
    };

    void run();
    void finish(uint64_t ticket);
    void leave_to_parent();

    ForkGuard fork_;
    Fd event_;
    uint32_t queue_max_;
    std::unique_ptr<State> state_ = std::make_unique<State>();
    uint64_t next_ticket_ GUARDED_BY(state_->mutex) = 1;
    Mutex closing_;  // a thread is joined once
    std::vector<std::unique_ptr<std::thread>> threads_ GUARDED_BY(closing_);
};

}  // namespace moonpool
