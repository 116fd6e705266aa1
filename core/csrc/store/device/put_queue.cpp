#include "store/device/put_queue.hpp"

#include <utility>

#include "store/device/save_job.hpp"

namespace moonpool {

Result<std::unique_ptr<PutQueue>> PutQueue::open() {
    std::unique_ptr<PutQueue> puts(new PutQueue());
    if (Status started = puts->thread_.start("moonpool-put", [&all = *puts] { all.run(); }); !started) {
        return started.error();
    }
    return puts;
}

void PutQueue::push(std::shared_ptr<SaveJob> job, ChunkInFlight in) {
    MutexLock lock(mutex_);
    queue_.push_back({std::move(job), std::move(in)});
    changed_.notify_all();
}

void PutQueue::close(std::chrono::steady_clock::time_point deadline) {
    {
        MutexLock lock(mutex_);
        if (!deadline_) deadline_ = deadline;
        changed_.notify_all();
    }
    thread_.join();
}

void PutQueue::run() {
    while (std::optional<Staged> staged = next()) {
        if (too_late()) {
            staged->job->refuse("the engine closed before its save was in the pool");
        } else {
            staged->job->put(staged->in);
        }
    }
}

std::optional<PutQueue::Staged> PutQueue::next() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() REQUIRES(mutex_) { return deadline_ || !queue_.empty(); });
    if (queue_.empty()) return std::nullopt;
    std::optional<Staged> staged(std::move(queue_.front()));
    queue_.pop_front();
    return staged;
}

bool PutQueue::too_late() {
    MutexLock lock(mutex_);
    return deadline_ && std::chrono::steady_clock::now() >= *deadline_;
}

}  // namespace moonpool
