// Pump: the one thread of an engine that cuts jobs into requests, keeps a number of them under way to the
// files' disks, and ends the jobs: when all is moved, when the job is stopped, or when nothing has moved for
// its timeout.
//
// A request may outlast its job: no system call takes it back from a disk that hangs. Until it ends it holds
// the local region, so that the memory is not freed (Operation in transport/region.hpp), or has a buffer of
// its own; it touches nothing of the job any more.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "io/buffers.hpp"
#include "io/opened_file.hpp"
#include "io/queue.hpp"
#include "transport/counters.hpp"
#include "transport/link.hpp"

namespace moonpool::transport::file {

// A file as one link reaches it.
struct Served {
    std::shared_ptr<io::OpenedFile> file;
    TransportCounters& counters;  // used while a job runs
    std::atomic<bool> closed{false};

    uint32_t in_flight = 0;    // of the pump's thread
    uint64_t progress_ns = 0;  // the same: when a request ended last
};

class Pump {
   public:
    // queue: for the files of this engine. per_file_max: requests under way, so that a file whose disk hangs
    // leaves room for the others.
    static Result<std::shared_ptr<Pump>> start(std::unique_ptr<io::Queue> queue, uint32_t per_file_max);
    Pump(const Pump&) = delete;

    // finished() is called once, on the pump's thread; at once after stop().
    void post(std::shared_ptr<Job> job, std::shared_ptr<Served> served, Link::Finished finished);
    // Ends all jobs, and waits until no request is under way, until `end` at most. What is under way then
    // keeps the thread and what it uses.
    void stop(std::chrono::steady_clock::time_point end);
    const char* queue_name() const { return queue_->name(); }

   private:
    struct Task;
    struct Piece;
    using TaskPtr = std::shared_ptr<Task>;

    Pump(std::unique_ptr<io::Queue> queue, uint32_t per_file_max);

    void run();
    void take_new();
    bool issue_some();
    bool issue_from(std::deque<TaskPtr>& tasks);
    bool issue(const TaskPtr& task);
    bool cut(Task& task, Piece& piece);
    void shape(const Task& task, Piece& piece, uint64_t left);
    bool prepare(Task& task, Piece& piece);
    void end_piece(const io::Done& done);
    void take_in(Task& task, Piece& piece, const io::Done& done);
    void look_at_clocks();
    bool end_if_over(const TaskPtr& task);
    void end_task(Task& task, Status status);
    void end_all(std::deque<TaskPtr>& tasks);

    const std::unique_ptr<io::Queue> queue_;
    const uint32_t per_file_max_;
    io::Buffers buffers_;

    Mutex mutex_;
    CondVar ended_;
    std::vector<TaskPtr> new_ GUARDED_BY(mutex_);
    bool stopping_ GUARDED_BY(mutex_) = false, over_ GUARDED_BY(mutex_) = false;

    // Of the thread.
    std::deque<TaskPtr> foreground_, background_;
    std::unordered_map<uint64_t, std::unique_ptr<Piece>> pieces_;  // under way, by tag
    uint64_t next_tag_ = 1;
    uint32_t background_in_flight_ = 0;
    std::vector<io::Done> done_;
    uint64_t looked_ns_ = 0;
};

}  // namespace moonpool::transport::file
