// How a slice becomes requests, and requests become its state.
//
//     whole blocks, aligned memory     straight between the disk and the memory, kPieceBytes at a time
//     the edges of a write             through the page cache, which keeps the rest of their block
//     anything else                    whole blocks between the disk and a buffer, copied to or from it
//
// Each turn of the thread issues what there is room for, one request from each job in turn, foreground first,
// and takes in what has ended. A slice is done with its last request, and failed by its first error; a job
// ends when none of its requests is under way, or without them when its time is over.
#include "transport/file/pump.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "base/clock.hpp"

namespace moonpool::transport::file {

namespace {

constexpr uint64_t kPieceBytes = 1u << 20;
constexpr uint64_t kBufferBytes = 256u << 10;
constexpr uint32_t kBuffers = 64;
constexpr uint32_t kBackgroundMax = 8;  // requests of background jobs
constexpr uint64_t kLookNs = 20000000;  // between two looks at the clocks
constexpr int kLookMs = 20, kRestMs = 60000;
constexpr uint64_t kGraceNs = 1000000000;  // of a stopped job, for what is under way

std::string gone_text(int error) {
    switch (error) {
        case ENOSPC:
            return "the disk is full";
        case EDQUOT:
            return "the quota is used up";
        case EFBIG:
            return "the file may not become that long";
        default:
            return std::strerror(error);
    }
}

Code code_of(int error) {
    // What another try would not mend is the system's word; the rest may be another path's.
    return error == EIO || error == ENODEV || error == ENXIO ? Code::kUnavailable : Code::kOs;
}

}  // namespace

// One job, until it ends.
struct Pump::Task {
    std::shared_ptr<Job> job;  // null: it has ended, and nothing of it may be touched
    std::shared_ptr<Served> served;
    Link::Finished finished;
    bool background = false;
    size_t next = 0;  // the slice that is cut next
    uint64_t at = 0;
    std::vector<uint64_t> left;  // of each slice: bytes that were not moved
    uint32_t in_flight = 0;
    uint64_t stopped_ns = 0;  // when it was seen to be stopped

    bool issued() const { return next == job->slices.size(); }
    bool stopped() const { return job->stopped() || served->closed.load(std::memory_order_relaxed); }
    void fail(size_t i, Code code, const std::string& why) {
        if (!job->is_waiting(i)) return;
        job->bytes_done.fetch_sub(job->slices[i].length - left[i], std::memory_order_relaxed);
        job->fail(i, code, why);
    }
};

// One request, and what it holds.
struct Pump::Piece {
    TaskPtr task;
    std::shared_ptr<Served> served;
    size_t slice = 0;
    bool write = false, background = false;
    uint64_t offset = 0, bytes = 0;  // in the file
    std::byte* local = nullptr;
    bool edge = false, buffered = false;
    std::byte* buffer = nullptr;
    uint64_t before = 0;  // bytes in the buffer before those that were asked for
    // Of one that moves straight to or from local memory.
    std::shared_ptr<const Regions> regions;
    Region* held = nullptr;

    ~Piece() {
        if (held != nullptr) held->end_operation();
    }
};

Pump::Pump(std::unique_ptr<io::Queue> queue, uint32_t per_file_max)
    : queue_(std::move(queue)), per_file_max_(per_file_max), buffers_(kBuffers, kBufferBytes) {}

Result<std::shared_ptr<Pump>> Pump::start(std::unique_ptr<io::Queue> queue, uint32_t per_file_max) {
    std::shared_ptr<Pump> pump(new Pump(std::move(queue), per_file_max));
    if (!pump->buffers_.valid()) return os_error("memory for the buffers of files");
    try {
        // The thread keeps what it uses, also when stop() has not seen its end.
        std::thread thread([pump] { pump->run(); });
        ::pthread_setname_np(thread.native_handle(), "moonpool-file");
        thread.detach();
    } catch (const std::system_error& error) {
        return os_error("starting the thread for files", error.code().value());
    }
    return pump;
}

void Pump::post(std::shared_ptr<Job> job, std::shared_ptr<Served> served, Link::Finished finished) {
    auto task = std::make_shared<Task>();
    task->left.reserve(job->slices.size());
    for (const Slice& slice : job->slices) task->left.push_back(slice.length);
    task->background = job->background;
    task->job = std::move(job);
    task->served = std::move(served);
    task->finished = std::move(finished);
    {
        MutexLock lock(mutex_);
        if (!stopping_) {
            new_.push_back(std::move(task));
            queue_->wake();
            return;
        }
    }
    end_task(*task, Error{Code::kClosed, "this engine is closed"});
}

void Pump::stop(std::chrono::steady_clock::time_point end) {
    MutexLock lock(mutex_);
    stopping_ = true;
    queue_->wake();
    (void)ended_.wait_until(lock, end, [this]() REQUIRES(mutex_) { return over_; });
}

void Pump::run() {
    for (;;) {
        bool stopping;
        {
            MutexLock lock(mutex_);
            stopping = stopping_;
        }
        take_new();
        if (stopping) {
            end_all(foreground_);
            end_all(background_);
            if (pieces_.empty()) break;
        }
        while (issue_some()) {
        }
        bool busy = !foreground_.empty() || !background_.empty();
        done_.clear();
        queue_->reap(done_, busy ? kLookMs : kRestMs);
        for (const io::Done& done : done_) end_piece(done);
        look_at_clocks();
    }
    MutexLock lock(mutex_);
    over_ = true;
    ended_.notify_all();
}

void Pump::take_new() {
    std::vector<TaskPtr> tasks;
    {
        MutexLock lock(mutex_);
        tasks.swap(new_);
    }
    for (TaskPtr& task : tasks) (task->background ? background_ : foreground_).push_back(std::move(task));
}

// ---- issuing

bool Pump::issue_some() {
    if (pieces_.size() >= queue_->depth()) return false;
    if (issue_from(foreground_)) return true;
    return background_in_flight_ < kBackgroundMax && issue_from(background_);
}

// One request of the first job that has one to give, which then waits behind the others.
bool Pump::issue_from(std::deque<TaskPtr>& tasks) {
    for (size_t n = tasks.size(); n != 0; --n) {
        TaskPtr task = std::move(tasks.front());
        tasks.pop_front();
        bool issued = issue(task);
        if (!issued && end_if_over(task)) continue;
        tasks.push_back(std::move(task));
        if (issued) return true;
    }
    return false;
}

bool Pump::issue(const TaskPtr& task) {
    if (task->stopped_ns != 0 || task->issued()) return false;
    if (task->stopped()) {
        task->stopped_ns = now_ns();
        return false;
    }
    if (task->served->in_flight >= per_file_max_) return false;
    auto piece = std::make_unique<Piece>();
    if (!cut(*task, *piece)) return false;
    piece->task = task;
    piece->served = task->served;
    piece->background = task->background;
    io::OpenedFile& file = *task->served->file;
    io::Operation operation;
    operation.kind = piece->write ? io::Operation::Kind::kWrite : io::Operation::Kind::kRead;
    operation.file = piece->edge ? &file.edges() : &file.blocks();
    operation.offset = piece->offset - piece->before;
    operation.data = piece->buffered ? piece->buffer : piece->local;
    uint64_t bytes = piece->before + piece->bytes;
    // What a buffer takes in may begin and end with bytes that were not asked for.
    if (piece->buffered && !piece->edge && file.direct()) {
        bytes = (bytes + file.block_bytes() - 1) / file.block_bytes() * file.block_bytes();
    }
    operation.bytes = static_cast<uint32_t>(bytes);
    operation.tag = next_tag_++;
    ++task->in_flight;
    ++task->served->in_flight;
    if (task->background) ++background_in_flight_;
    pieces_.emplace(operation.tag, std::move(piece));
    queue_->submit(operation);
    return true;
}

// The next request of a job; false: there is none, or no buffer for it now.
bool Pump::cut(Task& task, Piece& piece) {
    Job& job = *task.job;
    io::OpenedFile& file = *task.served->file;
    for (; task.next < job.slices.size(); ++task.next, task.at = 0) {
        const size_t i = task.next;
        const Slice& slice = job.slices[i];
        if (!job.is_waiting(i) || task.at == slice.length) continue;
        piece.slice = i;
        piece.write = slice.direction == Direction::kWrite;
        if (task.at == 0) {
            if (slice.length > file.length() || slice.remote > file.length() - slice.length) {
                task.fail(i, Code::kInvalidArgument,
                          "the range " + range_text(slice) + " does not lie in the file, which has " +
                              std::to_string(file.length()) + " bytes");
                continue;
            }
            if (piece.write && !file.read_only().empty()) {
                task.fail(i, Code::kInvalidArgument, "the file cannot be written: " + file.read_only());
                continue;
            }
        }
        piece.offset = slice.remote + task.at;
        piece.local = reinterpret_cast<std::byte*>(slice.local + task.at);
        shape(task, piece, slice.length - task.at);
        if (piece.buffered && buffers_.available() == 0) return false;
        if (!prepare(task, piece)) continue;
        task.at += piece.bytes;
        if (task.at == slice.length) ++task.next, task.at = 0;
        return true;
    }
    return false;
}

// How many of the bytes that are left, and by which way.
void Pump::shape(const Task& task, Piece& piece, uint64_t left) {
    const io::OpenedFile& file = *task.served->file;
    // A region that only its job's thread keeps is not there any more when a request outlasts the job.
    const bool own = task.job->regions == nullptr;
    piece.edge = false;
    piece.before = 0;
    piece.buffered = own;
    piece.bytes = std::min(left, own ? kBufferBytes : kPieceBytes);
    if (!file.direct()) return;
    const uint64_t block = file.block_bytes();
    const uint64_t in_block = piece.offset % block;
    const bool aligned = reinterpret_cast<uint64_t>(piece.local) % file.memory_align() == 0;
    if (piece.write) {
        if (in_block != 0 || left < block) {
            piece.edge = true;
            piece.bytes = std::min(left, block - in_block);
            return;
        }
        piece.buffered = own || !aligned;
        piece.bytes = std::min(left / block * block, piece.buffered ? kBufferBytes : kPieceBytes);
        return;
    }
    if (in_block == 0 && left >= block && aligned && !own) {
        piece.bytes = std::min(left / block * block, kPieceBytes);
        return;
    }
    piece.buffered = true;
    piece.before = in_block;
    piece.bytes = std::min(left, kBufferBytes - in_block);
    // Only the first block, when the rest of a long range can go straight to its memory.
    uint64_t head = block - in_block;
    bool straight_behind = (reinterpret_cast<uint64_t>(piece.local) + head) % file.memory_align() == 0;
    if (in_block != 0 && straight_behind && !own && left > kBufferBytes) piece.bytes = head;
}

// Takes what the request needs: the region, or a buffer with the bytes to write. False: the slice failed.
bool Pump::prepare(Task& task, Piece& piece) {
    Job& job = *task.job;
    const Slice& slice = job.slices[piece.slice];
    Region& region = *job.locals[piece.slice];
    if (piece.buffered && !piece.write) {
        piece.buffer = buffers_.take();
        return true;
    }
    if (!piece.buffered) {
        bool inside = region.contains(slice.local, slice.length) && task.at + piece.bytes <= slice.length;
        if (inside && region.begin_operation()) {
            piece.held = &region;
            piece.regions = job.regions;
            return true;
        }
        task.fail(piece.slice, inside ? Code::kInvalidArgument : Code::kProtocol,
                  inside ? "the local region was deregistered" : kOutsideText);
        return false;
    }
    Visit visit;
    Visit::Access access = visit.reach(region, slice.local, slice.length, task.at, piece.bytes);
    if (access != Visit::Access::kGranted) {
        bool closing = access == Visit::Access::kClosing;
        task.fail(piece.slice, closing ? Code::kInvalidArgument : Code::kProtocol,
                  closing ? "the local region was deregistered" : kOutsideText);
        return false;
    }
    piece.buffer = buffers_.take();
    std::memcpy(piece.buffer, piece.local, piece.bytes);
    return true;
}

// ---- taking in

void Pump::end_piece(const io::Done& done) {
    auto it = pieces_.find(done.tag);
    if (it == pieces_.end()) return;
    std::unique_ptr<Piece> piece = std::move(it->second);
    pieces_.erase(it);
    Task& task = *piece->task;
    --task.in_flight;
    --piece->served->in_flight;
    if (piece->background) --background_in_flight_;
    if (task.job != nullptr) take_in(task, *piece, done);
    if (piece->buffer != nullptr) buffers_.give_back(piece->buffer);
    TaskPtr owner = piece->task;
    piece.reset();  // it leaves the region before the job can end
    if (owner->job == nullptr || !end_if_over(owner)) return;
    std::erase(owner->background ? background_ : foreground_, owner);
}

void Pump::take_in(Task& task, Piece& piece, const io::Done& done) {
    Job& job = *task.job;
    const Slice& slice = job.slices[piece.slice];
    int error = done.error;
    // Bytes behind those that were asked for may lie behind the file's end.
    if (error == io::kFileEnds && done.bytes >= piece.before + piece.bytes) error = 0;
    if (error != 0) {
        std::string text = (piece.write ? "writing " : "reading ") + std::to_string(piece.bytes) +
                           " bytes at " + std::to_string(piece.offset) + " failed: ";
        if (error != io::kFileEnds) return task.fail(piece.slice, code_of(error), text + gone_text(error));
        Result<uint64_t> now = piece.served->file->look();
        text += "the file was cut short" + (now ? ", to " + std::to_string(*now) + " bytes" : "");
        return task.fail(piece.slice, Code::kInvalidArgument, text);
    }
    const uint64_t now = now_ns();
    job.progress_ns.store(now, std::memory_order_relaxed);
    piece.served->progress_ns = now;
    if (!job.is_waiting(piece.slice)) return;
    if (piece.buffered && !piece.write) {
        Visit visit;
        uint64_t at = piece.offset - slice.remote;
        Visit::Access access =
            visit.reach(*job.locals[piece.slice], slice.local, slice.length, at, piece.bytes);
        if (access != Visit::Access::kGranted) {
            return task.fail(piece.slice, Code::kInvalidArgument, "the local region was deregistered");
        }
        std::memcpy(piece.local, piece.buffer + piece.before, piece.bytes);
    }
    job.bytes_done.fetch_add(piece.bytes, std::memory_order_relaxed);
    task.left[piece.slice] -= piece.bytes;
    if (task.left[piece.slice] != 0) return;
    TransportCounters& counters = piece.served->counters;
    (piece.write ? counters.write : counters.read).add(1, slice.length);
    job.done(piece.slice);
}

// ---- ending

void Pump::look_at_clocks() {
    if (now_ns() - looked_ns_ < kLookNs) return;
    looked_ns_ = now_ns();
    for (auto* tasks : {&foreground_, &background_}) {
        std::erase_if(*tasks, [this](const TaskPtr& task) {
            if (task->stopped_ns == 0 && task->stopped()) task->stopped_ns = looked_ns_;
            return end_if_over(task);
        });
    }
}

bool Pump::end_if_over(const TaskPtr& task) {
    Job& job = *task->job;
    if (task->in_flight == 0 && (job.waiting == 0 || task->issued())) {
        end_task(*task, success());
        return true;
    }
    const uint64_t now = now_ns();
    if (task->stopped_ns != 0) {
        if (task->in_flight != 0 && now - task->stopped_ns < kGraceNs) return false;
        bool closed = !job.stopped();
        end_task(*task, Error{Code::kClosed, closed ? "the file was closed meanwhile" : "stopped"});
        return true;
    }
    // A job that waits for its turn is not late while the file's requests end.
    uint64_t moved_ns = job.progress_ns.load(std::memory_order_relaxed);
    if (task->in_flight == 0) moved_ns = std::max(moved_ns, task->served->progress_ns);
    if (now < moved_ns || now - moved_ns < static_cast<uint64_t>(job.timeout_ms) * 1000000) return false;
    std::string text = "the disk does not answer";
    if (task->in_flight != 0) {
        text +=
            "; until it does, " + std::to_string(task->in_flight) +
            " requests of this transfer may read and write registered memory, which its close() waits for";
    }
    end_task(*task, Error{Code::kTimeout, text});
    return true;
}

void Pump::end_task(Task& task, Status status) {
    Link::Finished finished = std::move(task.finished);
    finished(std::exchange(task.job, nullptr), std::move(status));
}

void Pump::end_all(std::deque<TaskPtr>& tasks) {
    for (const TaskPtr& task : std::exchange(tasks, {})) {
        end_task(*task, Error{Code::kClosed, "this engine is closed"});
    }
}

}  // namespace moonpool::transport::file
