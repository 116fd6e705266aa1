// Queue: the jobs and questions of all callers to one peer, from which each of its connections takes its next
// frame when it has room. So callers share the connections, a large job is carried by several of them, and
// what one that fails has not been answered goes over the others.
//
//   add(), ask() ──► questions   ┐
//                    foreground  ├─ fill() ──► a frame of a connection ──► settle(), answer(): answered
//                    background  ┘                        └──► give_back(): the connection failed
//
// Jobs of one priority take turns, a frame each. A deadline is a job's own: it runs while no byte of the job
// moves, nor any other byte of the connections that carry it. A job that is over (its time has run out, it
// was cancelled, the peer was closed) asks for nothing more, and ends when nothing of it is under way.
//
// Thread-safe. It knows no socket and waits for none, but in wait().
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/link.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::tcp {

// A connection on which nothing has moved for so long may be given up for a job that could not wait longer.
inline constexpr int kStillMs = 1000;

struct Piece {
    uint32_t slice;
    uint32_t length;
    uint64_t at;    // in the slice
    uint32_t back;  // bytes at its front that the piece before it has, too
    bool read;
    bool lost = false;  // its region was deregistered on the way: what comes for it is thrown away
};

// What one caller wants: a job or a question. Its fields are the queue's.
class Task {
   public:
    // Nothing of it is under way any more, and its result is there.
    bool ended() const { return ended_.load(std::memory_order_acquire); }

   private:
    friend class Queue;
    using Finished = std::function<void(Task&)>;  // null: a thread waits

    std::shared_ptr<Job> job_;  // null: a question
    Kind kind_{};
    std::vector<std::byte> body_;  // of the question, then of its answer
    Finished finished_;
    const void* home_ = nullptr;  // only this connection asks for it; null: each may
    int timeout_ms_ = 0;
    uint64_t asked_ns_ = 0;  // a question; a job has its own time

    size_t slice_ = 0;                                     // the next byte to ask for is that of
    uint64_t at_ = 0;                                      // this slice, at this place
    std::vector<std::pair<uint32_t, uint64_t>> answered_;  // slices in several pieces: bytes that were
    std::vector<Piece> again_;                             // of connections that failed
    size_t frames_ = 0;                                    // under way
    bool asks_ = true;                                     // it is in one of the lists that fill() reads
    bool over_ = false;
    int failures_ = 0;          // of connections, since it moved
    std::optional<Error> why_;  // it is over, or its last connection failed
    size_t place_ = 0;          // in Queue::all_
    CondVar condition_;
    std::atomic<bool> ended_{false};
};

// What is sent at once, and answered at once.
struct Frame {
    enum class Kind : uint8_t { kTransfer, kQuestion, kFence };
    Kind kind = Kind::kTransfer;
    moonpool::Kind wire{};       // of a question or a fence
    std::shared_ptr<Task> task;  // null: a fence, or its answer is of no use any more
    std::vector<std::byte> head;
    std::vector<Piece> pieces;
    std::vector<uint32_t> fenced;
    uint64_t id = 0;
    uint64_t write_bytes = 0, read_bytes = 0;
    uint64_t sent = 0;
    uint64_t total() const { return head.size() + write_bytes; }
    uint64_t bytes() const { return write_bytes + read_bytes; }
};

class Queue {
   public:
    Queue(TransportCounters& moved, Counters& counters) : moved_(moved), counters_(counters) {}
    Queue(const Queue&) = delete;

    // home: the connection whose driver adds it, and which alone carries it until it has no more room.
    using Finished = Link::Finished;
    std::shared_ptr<Task> add(std::shared_ptr<Job> job, Finished finished, const void* home);
    using Answer = Result<std::vector<std::byte>>;
    using Answered = std::function<void(Answer)>;
    std::shared_ptr<Task> ask(Kind kind, std::vector<std::byte> body, int timeout_ms, Answered answered,
                              const void* home);
    // Of tasks without a callback.
    Status wait(Task& task);
    Answer wait_for_answer(Task& task);

    // ---- for connections

    struct Room {
        uint64_t frame_bytes;
        bool transfers, background;  // whether there is room for them
        bool fencing;                // a FENCE is under way
    };
    // The next frame, but for its head. False: nothing for this connection.
    bool fill(Frame& frame, const void* connection, const Room& room);
    bool has_work(const void* connection);
    // It takes no more for now: others may take of its foreground jobs that have more than so many bytes
    // left. False: there are none.
    bool share(const void* connection, uint64_t bytes_left);
    // Of connections that were given up: no byte is asked for before they are fenced.
    void fence(std::span<const uint32_t> channels);
    void fenced(const Frame& frame);
    // Nothing that a connection which was given up has written can still arrive.
    bool all_fenced() const;

    // The frame was answered; states: a byte for each piece, not 0: refused. Empty: all done.
    void settle(Frame& frame, std::span<const std::byte> states, const Error& refusal);
    void answer(Frame& frame, Answer answer);
    // The connection failed, with these frames under way.
    void give_back(std::span<Frame> frames, const Error& error);
    // The frame was not begun.
    void take_back(Frame& frame);
    // What comes of this frame is of no use any more.
    void abandon(Frame& frame);
    // No connection could be made, and there is no other.
    void unreachable(const Error& error);

    // Called now and then by each connection, also when nothing moves.
    void look(uint64_t now);
    enum class State { kGoesOn, kOver, kClosing };
    // Of a task with frames on a connection where something moved at moved_ns.
    State state_of(Task& task, uint64_t now, uint64_t moved_ns);
    // For how long nothing may move on a connection that carries it, before another is tried.
    static int patience_ms(const Task& task);
    static const Job& job(const Task& task) { return *task.job_; }
    // A byte of the frame moved.
    void progress(const Frame& frame, uint64_t now);

    // All tasks are over, later ones at once.
    void close();
    bool closed() const { return closed_.load(); }

   private:
    using Tasks = std::deque<std::shared_ptr<Task>>;

    void add(const std::shared_ptr<Task>& task);
    Tasks& list_of(const Task& task) REQUIRES(mutex_);
    void ask_again(const std::shared_ptr<Task>& task) REQUIRES(mutex_);
    bool fill_from(Tasks& tasks, Frame& frame, const void* connection, uint64_t room) REQUIRES(mutex_);
    bool take_pieces(Task& task, Frame& frame, uint64_t room) REQUIRES(mutex_);
    static bool has_left(const Task& task, uint64_t bytes);
    void fail_slice(Task& task, uint32_t slice, const Error& why) REQUIRES(mutex_);
    uint64_t forget(Task& task, uint32_t slice) REQUIRES(mutex_);
    bool is_late(const Task& task, uint64_t now, uint64_t moved_ns) REQUIRES(mutex_);
    void connection_failed(const std::shared_ptr<Task>& task, const Error& error) REQUIRES(mutex_);
    void end(const std::shared_ptr<Task>& task, std::optional<Error> why) REQUIRES(mutex_);
    void end_if_idle(const std::shared_ptr<Task>& task) REQUIRES(mutex_);
    void deliver(MutexLock& lock) NO_THREAD_SAFETY_ANALYSIS;

    TransportCounters& moved_;
    Counters& counters_;
    mutable Mutex mutex_;
    std::vector<std::shared_ptr<Task>> all_ GUARDED_BY(mutex_);
    Tasks questions_ GUARDED_BY(mutex_), foreground_ GUARDED_BY(mutex_), background_ GUARDED_BY(mutex_);
    std::vector<uint32_t> fences_ GUARDED_BY(mutex_);  // numbers of channels whose writes may still arrive
    std::vector<std::shared_ptr<Task>> ended_ GUARDED_BY(mutex_);  // their callbacks are to be called
    std::atomic<uint64_t> moved_ns_{0};                            // over any connection
    std::atomic<bool> closed_{false};
};

}  // namespace moonpool::transport::tcp
