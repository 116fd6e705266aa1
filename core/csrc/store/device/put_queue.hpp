// PutQueue: the threads that put the chunks of saves into the pool. The lane that copies goes on meanwhile,
// so the blocks of a save are free when its last chunk is in the ring, however long the puts of earlier
// chunks take.
//
// A thread puts the objects of its own columns, in the order in which the copies of the chunks ended: the
// parent of an object is of the same column, and so is put before it.
//
// A chunk in the queue holds its slot of the ring until the last thread has put its share; what saves may
// hold of the ring (device::RingShare) is the bound of the queue.
//
// Threads: push() on any thread, close() on one.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "store/device/copy_job.hpp"

namespace moonpool {

class SaveJob;

class PutQueue {
   public:
    static constexpr size_t kThreads = 2;

    static Result<std::unique_ptr<PutQueue>> open();
    ~PutQueue() { close(std::chrono::steady_clock::now()); }
    PutQueue(const PutQueue&) = delete;

    // in: a chunk of the job, in its slot. Not after close().
    void push(const std::shared_ptr<SaveJob>& job, ChunkInFlight in) EXCLUDES(mutex_);
    // What is queued is put until the deadline, and refused then. Returns when the threads have ended: the
    // puts under way have the limit of their client.
    void close(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);

   private:
    struct Staged {
        std::shared_ptr<SaveJob> job;
        std::shared_ptr<const ChunkInFlight> in;  // over when the last thread lets go of it
    };
    PutQueue() = default;
    void run(size_t thread) EXCLUDES(mutex_);
    std::optional<Staged> next(size_t thread) EXCLUDES(mutex_);
    bool too_late() EXCLUDES(mutex_);

    Mutex mutex_;
    CondVar changed_;
    std::array<std::deque<Staged>, kThreads> queues_ GUARDED_BY(mutex_);
    std::optional<std::chrono::steady_clock::time_point> deadline_ GUARDED_BY(mutex_);  // set by close()
    std::array<ServiceThread, kThreads> threads_;
};

}  // namespace moonpool
