// Run: the frames on their way over one channel, as a state machine without a thread: the thread that drives
// the channel calls step() when the socket may move, and waits as wants() says. Several frames are under way
// at a time and are answered in their order.
//
//   queue ──► frames of at most kRowsMax ranges and frame_bytes ─► one sendmsg each: head, ranges, payload
//             sent, unanswered: at most kWindowFrames             ◄── the head, then one recvmsg: payload in
//             place
//
// The head of an answer is read by itself: only it tells whether bytes of reads follow or reasons. Nothing
// but what belongs there ever lies in a user's memory, which others may write at the same time. (The
// destination of a failed read holds anything.)
//
// A slice is cut where a frame is full. Its next piece begins kOverlapBytes back, in what the piece before
// has moved: the target judges each piece by itself, and so finds all of them in one region or refuses the
// slice, as it does where nothing was cut.
//
// Jobs leave a connection that goes on: what comes for one that is over, or for a region that is closing, is
// thrown away. Only bytes of writes that are promised and under way hold both together.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "transport/tcp/channel.hpp"
#include "transport/tcp/queue.hpp"

namespace moonpool::transport::tcp {

class Run {
   public:
    // connection: as the queue knows it.
    Run(Channel& channel, Queue& queue, const void* connection)
        : channel_(channel), queue_(queue), connection_(connection) {}
    Run(const Run&) = delete;

    enum class Step {
        kMoved,    // bytes moved
        kIdle,     // the socket wants to wait
        kNothing,  // no frame is under way, and the queue has none for this channel
        kFailed,   // the channel is of no use any more; fail() gives its frames back
    };
    Step step();
    short wants() const;  // events for poll
    bool sending() const { return sent_ < frames_.size() || channel_.socket().unsent(); }
    bool busy() const { return !frames_.empty(); }

    // Any thread, as a moment's view.
    uint64_t bytes_open() const { return bytes_open_.load(std::memory_order_relaxed); }
    size_t frames_open() const { return frames_open_.load(std::memory_order_relaxed); }
    bool has_room() const;  // for a frame of a job
    bool is_silent(uint64_t now) const;
    // A large foreground job has more than this channel takes for now: others may help. Once for each frame.
    bool wants_help() { return std::exchange(wants_help_, false); }

    // Called now and then, also when nothing moves. False: nothing has moved for longer than a job here can
    // wait, or a job that is over cannot be ended otherwise; error() says which.
    bool check(uint64_t now);

    const Error& error() const { return error_; }
    void fail(const Error& error);

   private:
    bool make_frame();
    void write_head(Frame& frame);
    void ask_for_help(uint64_t bytes_left);
    bool send_some(bool& moved);
    bool unsendable(int error);
    bool may_unmap(const Frame& frame, const Piece& piece) const;
    // A part of a piece's bytes as the next of a system call's, if it may be.
    Visit::Access place(const Frame& frame, const Piece& piece, uint64_t skip, Visit& visit, iovec& part);
    bool receive_some(bool& moved);
    ssize_t receive_bytes(Frame& frame);
    ssize_t receive_payload(Frame& frame);
    ssize_t receive_head(const Frame& frame);
    ssize_t pull(iovec* parts, size_t count, bool may_fault = false);
    bool judge(Frame& frame);
    bool judge_head(Frame& frame);
    bool judge_refusals(Frame& frame);
    bool judge_answer(Frame& frame);
    bool is_refused(size_t piece) const { return !body_.empty() && body_[piece] != std::byte{0}; }
    void drop(size_t frame);
    bool misfit();
    bool lost(int error);
    bool broken(Code code, std::string text);
    void progress(const Frame& frame);

    Channel& channel_;
    Queue& queue_;
    const void* connection_;
    std::deque<Frame> frames_;  // those before sent_ are under way, frames_[sent_] may be half sent
    std::vector<Frame> spare_;
    size_t sent_ = 0;
    bool fencing_ = false;  // a FENCE is among them
    bool asked_for_help_ = false, wants_help_ = false;
    std::atomic<uint64_t> bytes_open_{0};
    std::atomic<size_t> frames_open_{0};

    // The answer to frames_.front(), part by part.
    enum class Part { kHead, kError, kStates, kWhy, kPayload, kAnswer };
    Part part_ = Part::kHead;
    struct {
        FrameHeader header;
        uint32_t rows = 0;
        uint32_t refused = 0;
    } head_;
    static_assert(sizeof(head_) == kAnswerHeadBytes);
    // Of an ERROR or of the answer to a question; or, where rows were refused, a byte for each row and why.
    std::vector<std::byte> body_;
    uint64_t have_ = 0;  // bytes of this part
    uint64_t payload_bytes_ = 0;
    Error refusal_;
    static constexpr size_t kAheadBytes = 4096;
    std::byte ahead_[kAheadBytes];  // what came along with a head: [ahead_begin_, ahead_end_)
    size_t ahead_begin_ = 0, ahead_end_ = 0;

    std::atomic<uint64_t> moved_ns_{now_ns()};  // anything, or a frame was begun
    uint64_t progress_ns_ = 0;                  // bytes of jobs, or an answer
    int unacknowledged_ = -1;                   // bytes in the socket when it was looked at last
    Error error_;
};

}  // namespace moonpool::transport::tcp
