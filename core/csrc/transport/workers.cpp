#include "transport/workers.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace moonpool::transport {

namespace {

constexpr std::chrono::seconds kIdle{5};

}  // namespace

void Workers::post(bool background, std::function<void()> function) {
    if (fork_.in_child()) return;
    MutexLock lock(mutex_);
    if (stopping_) {
        lock.unlock();
        function();
        return;
    }
    (background ? background_ : foreground_).push_back(std::move(function));
    // A thread is idle until it has woken: what was posted before may be for it.
    if (foreground_.size() + background_.size() <= idle_) {
        work_.notify_one();
    } else if (threads_ < threads_max_) {
        try {
            std::thread thread([this] { run(); });
            ++threads_;
            ::pthread_setname_np(thread.native_handle(), "moonpool-copy");
            thread.detach();                  // stop() waits for its end
        } catch (const std::system_error&) {  // the host allows no more; the threads that there are do it
            if (threads_ != 0) return;
            auto& queue = background ? background_ : foreground_;
            std::function<void()> alone = std::move(queue.back());
            queue.pop_back();
            lock.unlock();
            alone();
            return;
        }
    }
}

// The background leaves one thread to the foreground.
bool Workers::background_may_start() const {
    return !background_.empty() && (threads_max_ == 1 || busy_background_ + 1 < threads_max_);
}

void Workers::run() {
    MutexLock lock(mutex_);
    for (;;) {
        if (foreground_.empty() && !background_may_start()) {
            if (stopping_ && background_.empty()) break;
            ++idle_;
            bool woken = work_.wait_for(lock, kIdle, [this]() REQUIRES(mutex_) {
                return !foreground_.empty() || background_may_start() || (stopping_ && background_.empty());
            });
            --idle_;
            if (!woken && background_.empty()) break;
            continue;
        }
        bool background = foreground_.empty();
        auto& queue = background ? background_ : foreground_;
        std::function<void()> function = std::move(queue.front());
        queue.pop_front();
        busy_background_ += background ? 1 : 0;
        lock.unlock();
        function();
        function = nullptr;
        lock.lock();
        busy_background_ -= background ? 1 : 0;
        if (background && !background_.empty()) work_.notify_one();
    }
    --threads_;
    if (stopping_) work_.notify_all();
    if (threads_ == 0) ended_.notify_all();
}

void Lane::post(bool background, std::function<void()> function) {
    {
        MutexLock lock(state_->mutex);
        (background ? state_->background : state_->foreground).push_back(std::move(function));
        if (state_->threads == state_->threads_max) return;
        ++state_->threads;
    }
    state_->workers.post(background, [state = state_] { run(state); });
}

void Lane::run(const std::shared_ptr<State>& state) {
    MutexLock lock(state->mutex);
    for (;;) {
        auto& queue = state->foreground.empty() ? state->background : state->foreground;
        if (queue.empty()) break;
        std::function<void()> function = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        function();
        function = nullptr;
        lock.lock();
    }
    --state->threads;
}

bool Workers::stop(std::chrono::steady_clock::time_point end) {
    if (fork_.in_child()) return true;
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    return ended_.wait_until(lock, end, [this]() REQUIRES(mutex_) { return threads_ == 0; });
}

}  // namespace moonpool::transport
