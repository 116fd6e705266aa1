#include "store/client/worker.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace moonpool {

Worker::Worker(uint32_t threads, uint32_t queue_max)
    : event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), queue_max_(queue_max) {
    for (uint32_t i = 0; i < threads; ++i) {
        threads_.push_back(std::make_unique<std::thread>([this] { run(); }));
        ::pthread_setname_np(threads_.back()->native_handle(), "moonpool-work");
    }
}

Worker::~Worker() { close(); }

Result<uint64_t> Worker::submit(std::function<void(Running)> operation) {
    if (fork_.in_child()) return Error{Code::kForked, "this worker belongs to the parent process"};
    MutexLock lock(state_->mutex);
    if (state_->closing) return Error{Code::kClosed, "this worker is closed"};
    if (state_->queue.size() >= queue_max_) {
        return Error{Code::kTooLarge,
                     "the queue already holds " + std::to_string(queue_max_) + " operations, the limit"};
    }
    uint64_t ticket = next_ticket_++;
    state_->queue.emplace_back(ticket, std::move(operation));
    state_->work.notify_one();
    return ticket;
}

std::vector<uint64_t> Worker::poll() {
    std::vector<uint64_t> done;
    if (fork_.in_child()) return done;
    MutexLock lock(state_->mutex);
    if (state_->done.empty()) return done;
    done.swap(state_->done);
    uint64_t value;
    (void)!::read(event_.get(), &value, sizeof(value));
    return done;
}

void Worker::run() {
    State& state = *state_;
    MutexLock lock(state.mutex);
    for (;;) {
        state.work.wait(lock, [&]() REQUIRES(state.mutex) { return state.closing || !state.queue.empty(); });
        if (state.closing) return;
        auto [ticket, operation] = std::move(state.queue.front());
        state.queue.pop_front();
        ++state.running;
        lock.unlock();
        Running running(this, [this, ticket = ticket](const void*) { finish(ticket); });
        operation(running);
        operation = nullptr;
        running = nullptr;
        lock.lock();
    }
}

// On whatever thread lets go of the operation last.
void Worker::finish(uint64_t ticket) {
    MutexLock lock(state_->mutex);
    state_->done.push_back(ticket);
    uint64_t one = 1;
    (void)!::write(event_.get(), &one, sizeof(one));
    --state_->running;
    state_->none_running.notify_all();
}

// In a child of fork(), where no lock can be relied on: the threads exist in the parent only, here there is
// no thread to join or detach.
void Worker::leave_to_parent() NO_THREAD_SAFETY_ANALYSIS {
    for (auto& thread : threads_) (void)thread.release();
    (void)state_.release();  // destroying a condition variable waits for its waiters, which are not here
    threads_.clear();
}

void Worker::close() {
    if (fork_.in_child()) return leave_to_parent();
    MutexLock closing(closing_);
    {
        MutexLock lock(state_->mutex);
        state_->closing = true;
        state_->queue.clear();
    }
    state_->work.notify_all();
    for (auto& thread : threads_) {
        if (thread->joinable()) thread->join();
    }
    threads_.clear();
    MutexLock lock(state_->mutex);
    state_->none_running.wait(lock, [&]() REQUIRES(state_->mutex) { return state_->running == 0; });
}

}  // namespace moonpool
