// Run: jobs on their way over one channel, as a state machine without a thread: the caller calls step() when
// the socket may move, and waits as wants() says. Several frames are under way at a time and are answered in
// their order.
//
//   jobs ──► frames of at most kRowsMax ranges and frame_bytes ─► one sendmsg each: head, ranges, payload
//            sent, unanswered: at most kWindowFrames             ◄── the head, then one recvmsg: payload in
//            place
//
// The head of an answer is read by itself: only it tells whether bytes of reads follow or reasons. Nothing
// but what belongs there ever lies in a user's memory, which others may write at the same time. (The
// destination of a failed read holds anything.)
//
// A slice is cut where a frame is full. Its next piece begins kOverlapBytes back, in what the piece before
// has moved: the target judges each piece by itself, and so finds all of them in one region or refuses the
// slice, as it does where nothing was cut.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "transport/counters.hpp"
#include "transport/link.hpp"
#include "transport/tcp/channel.hpp"

namespace moonpool::transport::tcp {

class Run {
   public:
    using Finished = std::function<void(std::shared_ptr<Job>, Status)>;

    Run(Channel& channel, TransportCounters& counters) : channel_(channel), counters_(counters) {}
    Run(const Run&) = delete;

    // finished() is called once, from step() or fail(), when nothing of the job is under way any more.
    void add(std::shared_ptr<Job> job, Finished finished);

    enum class Step {
        kMoved,     // bytes moved
        kIdle,      // the socket wants to wait
        kFinished,  // nothing left to do
        kFailed,    // the channel is of no use any more; fail() ends the jobs
    };
    Step step();
    short wants() const;  // events for poll
    bool sending() const { return sent_ < frames_.size(); }
    uint64_t bytes_awaited() const { return bytes_open_; }

    // Called now and then, also when nothing moves. False: no progress since `stall_ms`, or a cancelled job
    // cannot be ended otherwise; error() says which.
    bool check(uint64_t now, int stall_ms);

    const Error& error() const { return error_; }
    void fail();
    size_t jobs() const { return foreground_.size() + background_.size(); }

   private:
    struct Piece {
        uint32_t slice;
        uint32_t length;
        uint64_t at;    // in the slice
        uint32_t back;  // bytes at its front that the piece before it has, too
        bool last;
    };
    struct Task {
        std::shared_ptr<Job> job;
        Finished finished;
        size_t slice = 0;  // the next byte to ask for is that of
        uint64_t at = 0;   // this slice, at this place
        size_t frames = 0;
        uint64_t partial = 0;     // bytes counted as done of a slice that is not
        uint64_t stopped_ns = 0;  // when it was first seen to be cancelled
        bool asked_all = false;
    };
    struct Frame {
        uint64_t id = 0;
        std::shared_ptr<Task> task;
        std::vector<std::byte> head;
        std::vector<Piece> pieces;
        uint64_t write_bytes = 0, read_bytes = 0;
        uint64_t sent = 0;
        uint64_t total() const { return head.size() + write_bytes; }
        uint64_t bytes() const { return write_bytes + read_bytes; }
    };

    bool make_frame();
    bool make_frame(const std::shared_ptr<Task>& task);
    bool send_some(bool& moved);
    // A part of a piece's bytes as the next of a system call's. False: error() says why it must not be.
    bool place(const Frame& frame, const Piece& piece, uint64_t skip, Visit& visit, iovec& part);
    bool receive_some(bool& moved);
    ssize_t receive_bytes(const Frame& frame);
    ssize_t receive_head(const Frame& frame);
    ssize_t pull(iovec* parts, size_t count);
    bool judge(Frame& frame);
    bool judge_head(Frame& frame);
    bool judge_refusals(Frame& frame);
    bool is_refused(size_t piece) const { return !body_.empty() && body_[piece] != std::byte{0}; }
    void settle(Frame& frame);
    void drop_front();
    void end_jobs(std::deque<std::shared_ptr<Task>>& tasks);
    bool misfit();
    bool lost(int error);
    bool broken(Code code, std::string text);
    void progress(const Frame& frame);

    Channel& channel_;
    TransportCounters& counters_;
    std::deque<std::shared_ptr<Task>> foreground_, background_;
    std::deque<Frame> frames_;  // those before sent_ are under way, frames_[sent_] may be half sent
    std::vector<Frame> spare_;
    size_t sent_ = 0;
    uint64_t bytes_open_ = 0;

    // The answer to frames_.front(), part by part.
    enum class Part { kHead, kError, kStates, kWhy, kPayload };
    Part part_ = Part::kHead;
    struct {
        FrameHeader header;
        uint32_t rows = 0;
        uint32_t refused = 0;
    } head_;
    static_assert(sizeof(head_) == kAnswerHeadBytes);
    std::vector<std::byte> body_;  // an ERROR's; or, where rows were refused, a byte for each row and why
    uint64_t have_ = 0;            // bytes of this part
    uint64_t payload_bytes_ = 0;
    Error refusal_;
    static constexpr size_t kAheadBytes = 4096;
    std::byte ahead_[kAheadBytes];  // what came along with a head: [ahead_begin_, ahead_end_)
    size_t ahead_begin_ = 0, ahead_end_ = 0;

    uint64_t moved_ns_ = now_ns();
    int unacknowledged_ = -1;  // bytes in the socket when it was looked at last
    Error error_;
};

}  // namespace moonpool::transport::tcp
