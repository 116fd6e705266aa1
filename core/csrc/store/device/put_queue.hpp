// PutQueue: the thread that puts the chunks of saves into the pool, in the order in which their copies ended.
// The lane that copies goes on meanwhile, so the blocks of a save are free when its last chunk is in the
// ring, however long the puts of earlier chunks take.
//
// A chunk in the queue holds its slot of the ring; what saves may hold of it (device::RingShare) is the bound
// of the queue.
//
// Threads: push() on any thread, close() on one.
#pragma once

#include <chrono>
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
    static Result<std::unique_ptr<PutQueue>> open();
    ~PutQueue() { close(std::chrono::steady_clock::now()); }
    PutQueue(const PutQueue&) = delete;

    // in: a chunk of the job, in its slot. Not after close().
    void push(std::shared_ptr<SaveJob> job, ChunkInFlight in) EXCLUDES(mutex_);
    // What is queued is put until the deadline, and refused then. Returns when the thread has ended: the put
    // under way has the limit of its client.
    void close(std::chrono::steady_clock::time_point deadline) EXCLUDES(mutex_);

   private:
    struct Staged {
        std::shared_ptr<SaveJob> job;
        ChunkInFlight in;
    };
    PutQueue() = default;
    void run() EXCLUDES(mutex_);
    std::optional<Staged> next() EXCLUDES(mutex_);
    bool too_late() EXCLUDES(mutex_);

    Mutex mutex_;
    CondVar changed_;
    std::deque<Staged> queue_ GUARDED_BY(mutex_);
    std::optional<std::chrono::steady_clock::time_point> deadline_ GUARDED_BY(mutex_);  // set by close()
    ServiceThread thread_;
};

}  // namespace moonpool
