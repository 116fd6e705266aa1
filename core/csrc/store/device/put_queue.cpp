#include "store/device/put_queue.hpp"

#include <utility>

#include "store/device/save_job.hpp"

namespace moonpool {

Result<std::unique_ptr<PutQueue>> PutQueue::open() {
    std::unique_ptr<PutQueue> puts(new PutQueue());
    for (size_t i = 0; i < kThreads; ++i) {
        Status started = puts->threads_[i].start("moonpool-put", [&all = *puts, i] { all.run(i); });
        if (!started) return started.error();  // the destructor ends those that run
    }
    return puts;
}

void PutQueue::push(const std::shared_ptr<SaveJob>& job, ChunkInFlight in) {
    auto chunk = std::make_shared<const ChunkInFlight>(std::move(in));
    MutexLock lock(mutex_);
    for (std::deque<Staged>& queue : queues_) queue.push_back({job, chunk});
    changed_.notify_all();
}

void PutQueue::close(std::chrono::steady_clock::time_point deadline) {
    {
        MutexLock lock(mutex_);
        if (!deadline_) deadline_ = deadline;
        changed_.notify_all();
    }
    for (ServiceThread& thread : threads_) thread.join();
}

void PutQueue::run(size_t thread) {
    while (std::optional<Staged> staged = next(thread)) {
        if (too_late()) {
            staged->job->refuse("the engine closed before its save was in the pool");
        } else {
            staged->job->put(*staged->in, thread);
        }
    }
}

std::optional<PutQueue::Staged> PutQueue::next(size_t thread) {
    MutexLock lock(mutex_);
    std::deque<Staged>& queue = queues_[thread];
    changed_.wait(lock, [&]() REQUIRES(mutex_) { return deadline_ || !queue.empty(); });
    if (queue.empty()) return std::nullopt;
    std::optional<Staged> staged(std::move(queue.front()));
    queue.pop_front();
    return staged;
}

bool PutQueue::too_late() {
    MutexLock lock(mutex_);
    return deadline_ && std::chrono::steady_clock::now() >= *deadline_;
}

}  // namespace moonpool
