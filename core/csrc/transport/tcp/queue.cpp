// The order in which what callers want is sent, and the books of what became of it.
//
// Threads: callers and the drivers of all connections. mutex_ guards the lists, the tasks, and what is
// written of their jobs; it is held for one frame's books at most, and while no callback runs: those of tasks
// that ended are called by deliver(), without it.
//
// Between two calls: a task is in all_ until it has ended, and in the list of its kind while it has something
// to ask for (asks_). frames_ counts its frames that connections have; a task that is over is in no list, and
// ends when frames_ is 0. Each byte of a waiting slice is in exactly one place: behind slice_/at_, in again_,
// in a frame, or answered (answered_, while the slice has others). job.bytes_done counts those that are
// answered, also of slices that are not whole; they are taken back when the slice fails and when the job
// ends.
#include "transport/tcp/queue.hpp"

#include <algorithm>

#include "transport/frames.hpp"

namespace moonpool::transport::tcp {

namespace {

// Of connections that failed under a task which moved nothing meanwhile. Silence is not counted: the deadline
// ends it.
constexpr int kAttempts = 3;
// A foreground frame may wait behind frames of the background, which are smaller than others.
constexpr uint64_t kBackgroundShare = 4;
constexpr uint64_t kOverlapBytes = 64;  // a line of the cache: what follows stays as aligned as it was

Error silence(int timeout_ms) {
    return Error{Code::kTimeout, "no progress within " + std::to_string(timeout_ms) + " ms"};
}

}  // namespace

// ---- callers

std::shared_ptr<Task> Queue::add(std::shared_ptr<Job> job, Finished finished, const void* home) {
    auto task = std::make_shared<Task>();
    task->timeout_ms_ = job->timeout_ms;
    task->job_ = std::move(job);
    task->home_ = home;
    if (finished) {
        task->finished_ = [finished = std::move(finished)](Task& ended) {
            Status status = ended.why_ ? Status(*ended.why_) : success();
            finished(std::move(ended.job_), std::move(status));
        };
    }
    add(task);
    return task;
}

std::shared_ptr<Task> Queue::ask(Kind kind, std::vector<std::byte> body, int timeout_ms, Answered answered,
                                 const void* home) {
    auto task = std::make_shared<Task>();
    task->kind_ = kind;
    task->body_ = std::move(body);
    task->timeout_ms_ = timeout_ms;
    task->home_ = home;
    if (answered) {
        task->finished_ = [answered = std::move(answered)](Task& ended) {
            answered(ended.why_ ? Answer(*ended.why_) : Answer(std::move(ended.body_)));
        };
    }
    add(task);
    return task;
}

void Queue::add(const std::shared_ptr<Task>& task) {
    task->asked_ns_ = now_ns();
    MutexLock lock(mutex_);
    task->place_ = all_.size();
    all_.push_back(task);
    list_of(*task).push_back(task);
    if (closed_) end(task, Error{Code::kClosed, "the segment was closed"});
    deliver(lock);
}

Status Queue::wait(Task& task) {
    MutexLock lock(mutex_);
    task.condition_.wait(lock, [&] { return task.ended(); });
    return task.why_ ? Status(*task.why_) : success();
}

Queue::Answer Queue::wait_for_answer(Task& task) {
    if (Status status = wait(task); !status) return status.error();
    return std::move(task.body_);
}

// ---- out

Queue::Tasks& Queue::list_of(const Task& task) {
    return task.job_ == nullptr ? questions_ : task.job_->background ? background_ : foreground_;
}

bool Queue::fill(Frame& frame, const void* connection, const Room& room) {
    MutexLock lock(mutex_);
    bool filled = false;
    if (closed_ || room.fencing) {
        // Until the answer, nothing: what a lost connection carried could come after what is asked for now.
    } else if (!fences_.empty() && (!questions_.empty() || !foreground_.empty() || !background_.empty())) {
        frame.kind = Frame::Kind::kFence;
        frame.wire = Kind::kEngineFence;
        frame.fenced.assign(fences_.begin(),
                            fences_.begin() + std::min<ptrdiff_t>(kFencesMax, std::ssize(fences_)));
        Writer w(frame.head);
        w.number(FrameHeader{});
        w.number(static_cast<uint32_t>(frame.fenced.size()));
        w.bytes(frame.fenced.data(), frame.fenced.size() * sizeof(uint32_t));
        filled = true;
    } else {
        filled = fill_from(questions_, frame, connection, 0) ||
                 (room.transfers && fill_from(foreground_, frame, connection, room.frame_bytes)) ||
                 (room.background &&
                  fill_from(background_, frame, connection, room.frame_bytes / kBackgroundShare));
    }
    deliver(lock);
    return filled;
}

bool Queue::fill_from(Tasks& tasks, Frame& frame, const void* connection, uint64_t room) {
    for (size_t i = 0; i < tasks.size();) {
        std::shared_ptr<Task> task = tasks[i];
        if (task->home_ != nullptr && task->home_ != connection) {
            ++i;
            continue;
        }
        bool filled = true;
        if (task->job_ == nullptr) {
            frame.kind = Frame::Kind::kQuestion;
            frame.wire = task->kind_;
            Writer w(frame.head);
            w.number(FrameHeader{});
            w.bytes(task->body_.data(), task->body_.size());
            task->asks_ = false;
        } else {
            frame.kind = Frame::Kind::kTransfer;
            filled = take_pieces(*task, frame, room);
        }
        tasks.erase(tasks.begin() + static_cast<ptrdiff_t>(i));
        if (task->asks_) tasks.push_back(task);  // behind the others of its kind
        if (!filled) {
            end_if_idle(task);
            continue;
        }
        ++task->frames_;
        frame.task = std::move(task);
        return true;
    }
    return false;
}

// False: it has nothing to ask for.
bool Queue::take_pieces(Task& task, Frame& frame, uint64_t room) {
    Job& job = *task.job_;
    if (job.stopped()) {
        task.over_ = true;
        task.asks_ = false;
        return false;
    }
    // A slice that was refused or whose region is gone needs nothing more, however much of it was asked for.
    auto is_wanted = [&](uint32_t slice) REQUIRES(mutex_) {
        if (!job.is_waiting(slice)) return false;
        if (!job.locals[slice]->closing()) return true;
        fail_slice(task, slice, Error{Code::kInvalidArgument, "the local region was deregistered"});
        return false;
    };
    auto put = [&](const Piece& piece) {
        frame.pieces.push_back(piece);
        (piece.read ? frame.read_bytes : frame.write_bytes) += piece.length;
        room -= std::min<uint64_t>(room, piece.length - piece.back);
    };
    while (!task.again_.empty() && frame.pieces.size() < kRowsMax && room != 0) {
        Piece piece = task.again_.back();
        bool wanted = is_wanted(piece.slice);
        if (wanted && !frame.pieces.empty() && piece.length - piece.back > room) break;
        task.again_.pop_back();
        if (wanted) put(piece);
    }
    while (task.again_.empty() && task.slice_ < job.slices.size() && frame.pieces.size() < kRowsMax &&
           room != 0) {
        auto number = static_cast<uint32_t>(task.slice_);
        if (!is_wanted(number)) {
            ++task.slice_;
            task.at_ = 0;
            continue;
        }
        const Slice& slice = job.slices[number];
        uint64_t n = std::min(slice.length - task.at_, room);
        // See run.hpp: the target finds the pieces of one slice in one region by their overlap.
        uint64_t back = std::min(task.at_, kOverlapBytes);
        put({number, static_cast<uint32_t>(back + n), task.at_ - back, static_cast<uint32_t>(back),
             slice.direction == Direction::kRead});
        task.at_ += n;
        if (task.at_ == slice.length) {
            ++task.slice_;
            task.at_ = 0;
        }
    }
    task.asks_ = !task.again_.empty() || task.slice_ != job.slices.size();
    return !frame.pieces.empty();
}

bool Queue::has_work(const void* connection) {
    MutexLock lock(mutex_);
    auto takes = [&](const auto& task) { return task->home_ == nullptr || task->home_ == connection; };
    return std::ranges::any_of(questions_, takes) || std::ranges::any_of(foreground_, takes) ||
           std::ranges::any_of(background_, takes);
}

bool Queue::share(const void* connection, uint64_t bytes_left) {
    MutexLock lock(mutex_);
    bool any = false;
    for (const auto& task : foreground_) {
        bool others = task->home_ != nullptr && task->home_ != connection;
        if (others || !has_left(*task, bytes_left)) continue;
        task->home_ = nullptr;
        any = true;
    }
    return any;
}

// More than so many bytes that were not asked for, or were by a connection that failed.
bool Queue::has_left(const Task& task, uint64_t bytes) {
    uint64_t left = 0;
    for (const Piece& piece : task.again_) left += piece.length - piece.back;
    const auto& slices = task.job_->slices;
    for (size_t i = task.slice_; i < slices.size() && left <= bytes; ++i) {
        left += slices[i].length - (i == task.slice_ ? task.at_ : 0);
    }
    return left > bytes;
}

void Queue::fence(std::span<const uint32_t> channels) {
    MutexLock lock(mutex_);
    fences_.insert(fences_.end(), channels.begin(), channels.end());
}

bool Queue::all_fenced() const {
    MutexLock lock(mutex_);
    return fences_.empty();
}

void Queue::fenced(const Frame& frame) {
    MutexLock lock(mutex_);
    std::erase_if(fences_,
                  [&](uint32_t n) { return std::ranges::find(frame.fenced, n) != frame.fenced.end(); });
}

// ---- what became of it

void Queue::progress(const Frame& frame, uint64_t now) {
    // A fence brings no job on, however often it is answered.
    if (frame.kind != Frame::Kind::kFence) moved_ns_.store(now, std::memory_order_relaxed);
    if (frame.task != nullptr && frame.task->job_ != nullptr) {
        frame.task->job_->progress_ns.store(now, std::memory_order_relaxed);
    }
}

// -> what was answered of it so far.
uint64_t Queue::forget(Task& task, uint32_t slice) {
    auto it = std::ranges::find(task.answered_, slice, &std::pair<uint32_t, uint64_t>::first);
    if (it == task.answered_.end()) return 0;
    uint64_t bytes = it->second;
    *it = task.answered_.back();
    task.answered_.pop_back();
    return bytes;
}

void Queue::fail_slice(Task& task, uint32_t slice, const Error& why) {
    task.job_->bytes_done.fetch_sub(forget(task, slice), std::memory_order_relaxed);
    task.job_->fail(slice, why.code, why.text);
}

void Queue::settle(Frame& frame, std::span<const std::byte> states, const Error& refusal) {
    if (frame.task == nullptr) return;
    MutexLock lock(mutex_);
    std::shared_ptr<Task> task = std::move(frame.task);
    --task->frames_;
    task->failures_ = 0;
    Job& job = *task->job_;
    {
        Tally tally(moved_);
        for (size_t i = 0; i < frame.pieces.size(); ++i) {
            const Piece& piece = frame.pieces[i];
            if (!job.is_waiting(piece.slice)) continue;  // another piece of it was refused
            if (!states.empty() && states[i] != std::byte{0}) {
                fail_slice(*task, piece.slice, refusal);
                continue;
            }
            if (piece.lost) {
                fail_slice(*task, piece.slice,
                           Error{Code::kInvalidArgument, "the local region was deregistered"});
                continue;
            }
            uint64_t length = job.slices[piece.slice].length, bytes = piece.length - piece.back;
            job.bytes_done.fetch_add(bytes, std::memory_order_relaxed);
            // Done once all of its bytes were answered, over whichever connections.
            uint64_t answered = bytes == length ? length : forget(*task, piece.slice) + bytes;
            if (answered != length) {
                task->answered_.emplace_back(piece.slice, answered);
                continue;
            }
            tally.count(!piece.read, length);
            job.done(piece.slice);
        }
    }
    end_if_idle(task);
    deliver(lock);
}

void Queue::answer(Frame& frame, Answer answer) {
    if (frame.task == nullptr) return;
    MutexLock lock(mutex_);
    std::shared_ptr<Task> task = std::move(frame.task);
    --task->frames_;
    if (answer) task->body_ = std::move(*answer);
    if (!task->over_) task->why_ = answer ? std::nullopt : std::optional<Error>(answer.error());
    end_if_idle(task);
    deliver(lock);
}

void Queue::take_back(Frame& frame) {
    MutexLock lock(mutex_);
    std::shared_ptr<Task> task = std::move(frame.task);
    --task->frames_;
    task->again_.insert(task->again_.end(), frame.pieces.begin(), frame.pieces.end());
    ask_again(task);
    end_if_idle(task);
    deliver(lock);
}

void Queue::ask_again(const std::shared_ptr<Task>& task) {
    if (task->asks_ || task->over_) return;
    task->asks_ = true;
    list_of(*task).push_front(task);
}

void Queue::abandon(Frame& frame) {
    MutexLock lock(mutex_);
    std::shared_ptr<Task> task = std::move(frame.task);
    --task->frames_;
    end_if_idle(task);
    deliver(lock);
}

void Queue::give_back(std::span<Frame> frames, const Error& error) {
    MutexLock lock(mutex_);
    std::vector<std::shared_ptr<Task>> touched;
    for (Frame& frame : frames) {
        if (frame.task == nullptr) continue;
        std::shared_ptr<Task> task = std::move(frame.task);
        --task->frames_;
        task->home_ = nullptr;
        if (task->job_ != nullptr) {
            counters_.retries_total.fetch_add(frame.pieces.size());
            task->again_.insert(task->again_.end(), frame.pieces.begin(), frame.pieces.end());
        } else if (task->kind_ == Kind::kEngineNotify && frame.sent != 0) {
            end(task, error);  // it may have arrived, and is not said twice
        }
        ask_again(task);
        if (std::ranges::find(touched, task) == touched.end()) touched.push_back(std::move(task));
    }
    for (const auto& task : touched) connection_failed(task, error);
    deliver(lock);
}

void Queue::unreachable(const Error& error) {
    MutexLock lock(mutex_);
    for (const auto& task : std::vector(all_)) {
        if (task->frames_ == 0) connection_failed(task, error);
    }
    deliver(lock);
}

void Queue::connection_failed(const std::shared_ptr<Task>& task, const Error& error) {
    if (!task->over_) {
        task->home_ = nullptr;
        task->why_ = error;
        if (error.code != Code::kTimeout && ++task->failures_ >= kAttempts) return end(task, error);
    }
    end_if_idle(task);
}

// ---- ends

bool Queue::is_late(const Task& task, uint64_t now, uint64_t moved_ns) {
    const Job* job = task.job_.get();
    uint64_t last = std::max(moved_ns, job == nullptr ? task.asked_ns_ : job->progress_ns.load());
    return now > last && (now - last) / 1000000 >= static_cast<uint64_t>(task.timeout_ms_);
}

int Queue::patience_ms(const Task& task) {
    // It is not said twice: no other connection would help.
    if (task.job_ == nullptr && task.kind_ == Kind::kEngineNotify) return task.timeout_ms_;
    // Half of its time: when this connection is stuck, another still has a chance.
    return std::max(task.timeout_ms_ / 2, kStillMs);
}

void Queue::look(uint64_t now) {
    MutexLock lock(mutex_);
    for (size_t i = all_.size(); i-- > 0;) {
        std::shared_ptr<Task> task = all_[i];
        if (task->over_) continue;
        if (task->job_ != nullptr && task->job_->stopped()) {
            end(task, std::nullopt);
        } else if (task->frames_ == 0 && is_late(*task, now, moved_ns_)) {
            end(task, task->why_ ? *task->why_ : silence(task->timeout_ms_));
        }
    }
    deliver(lock);
}

Queue::State Queue::state_of(Task& task, uint64_t now, uint64_t moved_ns) {
    MutexLock lock(mutex_);
    if (!task.over_ && is_late(task, now, moved_ns)) end(all_[task.place_], silence(task.timeout_ms_));
    if (!task.over_ && task.job_ != nullptr && task.job_->stopped()) end(all_[task.place_], std::nullopt);
    if (!task.over_) return State::kGoesOn;
    return closed_ || (task.job_ != nullptr && task.job_->closing->load()) ? State::kClosing : State::kOver;
}

// It asks for nothing more. why: nothing, where its job says it.
void Queue::end(const std::shared_ptr<Task>& task, std::optional<Error> why) {
    if (task->over_) return;
    task->over_ = true;
    task->why_ = std::move(why);
    if (task->asks_) std::erase(list_of(*task), task);
    task->asks_ = false;
    end_if_idle(task);
}

void Queue::end_if_idle(const std::shared_ptr<Task>& task) {
    if (task->frames_ != 0 || task->asks_ || task->ended()) return;
    all_[task->place_] = all_.back();
    all_[task->place_]->place_ = task->place_;
    all_.pop_back();
    if (Job* job = task->job_.get()) {
        // What came of a slice that is not whole does not count: the next path moves all of it.
        for (auto& [slice, bytes] : task->answered_) job->bytes_done.fetch_sub(bytes);
        task->answered_.clear();
        if (job->waiting == 0) task->why_.reset();
        if (job->waiting != 0 && !task->over_) {
            task->why_ = Error{Code::kProtocol, "internal error: bytes of a slice were left out"};
        }
    }
    task->over_ = true;
    task->ended_.store(true, std::memory_order_release);  // a caller's job is touched no more
    if (task->finished_) {
        ended_.push_back(task);
    } else {
        task->condition_.notify_one();
    }
}

void Queue::deliver(MutexLock& lock) {
    if (ended_.empty()) return;
    std::vector<std::shared_ptr<Task>> ended = std::exchange(ended_, {});
    lock.unlock();
    for (const auto& task : ended) task->finished_(*task);
    lock.lock();
}

void Queue::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    for (const auto& task : std::vector(all_)) end(task, Error{Code::kClosed, "the segment was closed"});
    deliver(lock);
}

}  // namespace moonpool::transport::tcp
