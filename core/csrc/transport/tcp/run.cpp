// Run: cuts jobs into frames, sends them, and takes the answers apart.
//
// Thread: the one that owns the channel at the time, a caller that drives it or an I/O thread; Run has no
// lock. No call blocks.
//
// Between two calls: frames_[0, sent_) are sent and unanswered, frames_[sent_] may be half sent, and no
// later one has begun. part_ and have_ say how far the answer to frames_.front() has come; nothing of an
// answer lies anywhere but in head_, body_, ahead_ or at its destination. A task's `frames` are those of
// frames_ that are its own; it ends when it has asked for everything and has none. `partial` is what
// job.bytes_done counts of a slice that is not done, and is taken back when the slice fails.
//
// Memory is entered for each system call by itself (place), after a check that the piece lies in its slice
// and the slice in its region: the arithmetic of this file is not trusted with users' memory.
#include "transport/tcp/run.hpp"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

namespace {

// What a foreground frame may wait behind is a few frames, those of the background smaller than others.
constexpr uint64_t kBackgroundShare = 4;
constexpr size_t kWindowFrames = 8;
constexpr size_t kWindowFramesBackground = 2;
constexpr uint64_t kCancelNs = 1000000000;  // then a cancelled job takes the connection with it
constexpr int kIovecsMax = 1024;            // in one system call, the kernel's limit
constexpr uint32_t kErrorBytesMin = 4;      // u16 code, text16
constexpr uint32_t kErrorBytesMax = 65600;
constexpr size_t kRefusalBytesMin = 4;  // behind the byte of each row: u16 code, text16
constexpr uint64_t kOverlapBytes = 64;  // a line of the cache: what follows stays as aligned as it was

}  // namespace

void Run::add(std::shared_ptr<Job> job, Finished finished) {
    auto task = std::make_shared<Task>();
    task->job = std::move(job);
    task->finished = std::move(finished);
    if (jobs() == 0) moved_ns_ = now_ns();
    (task->job->background ? background_ : foreground_).push_back(std::move(task));
}

short Run::wants() const { return static_cast<short>(sending() ? POLLIN | POLLOUT : POLLIN); }

// Sends before it receives: the peer works while the answers to earlier frames are read.
Run::Step Run::step() {
    bool moved = false;
    if (!send_some(moved) || !receive_some(moved)) return Step::kFailed;
    end_jobs(foreground_);
    end_jobs(background_);
    if (jobs() == 0) return Step::kFinished;
    return moved ? Step::kMoved : Step::kIdle;
}

// ---- out

// The next frame of the foreground, else of the background. False: nothing to ask for, or the window is full.
// The window bounds what a connection that fails has to repeat, and what a job of the foreground waits
// behind.
bool Run::make_frame() {
    if (frames_.size() >= kWindowFrames || bytes_open_ >= kWindowFrames * channel_.frame_bytes) return false;
    for (const auto& task : foreground_) {
        if (make_frame(task)) return true;
    }
    if (frames_.size() >= kWindowFramesBackground) return false;
    for (const auto& task : background_) {
        if (make_frame(task)) return true;
    }
    return false;
}

bool Run::make_frame(const std::shared_ptr<Task>& task) {
    Job& job = *task->job;
    if (task->asked_all) return false;
    if (job.stopped()) {
        task->asked_all = true;
        return false;
    }
    Frame frame;
    if (!spare_.empty()) {
        frame = std::move(spare_.back());
        spare_.pop_back();
    }
    uint64_t room = channel_.frame_bytes / (job.background ? kBackgroundShare : 1);
    while (task->slice < job.slices.size() && frame.pieces.size() < kRowsMax && room != 0) {
        const Slice& slice = job.slices[task->slice];
        if (!job.is_waiting(task->slice)) {  // refused, perhaps when only a part of it was asked for
            ++task->slice;
            task->at = 0;
            continue;
        }
        uint64_t n = std::min(slice.length - task->at, room);
        // See the header: the target finds the pieces of one slice in one region by their overlap.
        uint64_t back = std::min(task->at, kOverlapBytes);
        bool last = task->at + n == slice.length;
        frame.pieces.push_back({static_cast<uint32_t>(task->slice), static_cast<uint32_t>(back + n),
                                task->at - back, static_cast<uint32_t>(back), last});
        (slice.direction == Direction::kWrite ? frame.write_bytes : frame.read_bytes) += back + n;
        room -= n;
        task->at += n;
        if (last) {
            ++task->slice;
            task->at = 0;
        }
    }
    if (task->slice == job.slices.size()) task->asked_all = true;
    if (frame.pieces.empty()) {
        spare_.push_back(std::move(frame));
        return false;
    }
    frame.id = channel_.next_request++;
    frame.task = task;
    frame.head.resize(kTransferHeadBytes + frame.pieces.size() * sizeof(TransferRow));
    FrameHeader header;
    header.kind = Kind::kEngineTransfer;
    header.request_id = frame.id;
    header.length = static_cast<uint32_t>(frame.total() - sizeof(header));
    auto rows = static_cast<uint32_t>(frame.pieces.size());
    uint32_t zero = 0;
    std::byte* out = frame.head.data();
    std::memcpy(out, &header, sizeof(header));
    std::memcpy(out + sizeof(header), &rows, sizeof(rows));
    std::memcpy(out + sizeof(header) + 4, &zero, sizeof(zero));
    out += kTransferHeadBytes;
    for (const Piece& piece : frame.pieces) {
        const Slice& slice = job.slices[piece.slice];
        TransferRow row{slice.remote + piece.at, piece.length, static_cast<uint32_t>(slice.direction)};
        std::memcpy(out, &row, sizeof(row));
        out += sizeof(row);
    }
    // From here on the frame counts as under way, though none of it is sent.
    ++task->frames;
    bytes_open_ += frame.bytes();
    // Set before the first byte: a connection that carried a write is fenced when it is given up.
    if (frame.write_bytes != 0) channel_.wrote = true;
    frames_.push_back(std::move(frame));
    return true;
}

bool Run::place(const Frame& frame, const Piece& piece, uint64_t skip, Visit& visit, iovec& part) {
    const Job& job = *frame.task->job;
    const Slice& slice = job.slices[piece.slice];
    uint64_t bytes = piece.length - skip;
    switch (visit.reach(*job.locals[piece.slice], slice.local, slice.length, piece.at + skip, bytes)) {
        case Visit::Access::kGranted:
            part = {reinterpret_cast<void*>(slice.local + piece.at + skip), bytes};
            return true;
        case Visit::Access::kClosing:
            // The bytes were promised to the peer by the frame's head, so the connection is of no use any
            // more. The link fails the slices of that region and repeats the others elsewhere.
            return broken(Code::kInvalidArgument, "the local region was deregistered");
        case Visit::Access::kOutside:
            break;
    }
    return broken(Code::kProtocol, kOutsideText);
}

bool Run::send_some(bool& moved) {
    for (;;) {
        if (sent_ == frames_.size() && !make_frame()) return true;
        Frame& frame = frames_[sent_];
        Job& job = *frame.task->job;
        iovec parts[kIovecsMax];
        size_t count = 0;
        uint64_t skip = frame.sent;
        if (skip < frame.head.size()) {
            parts[count++] = {frame.head.data() + skip, frame.head.size() - skip};
            skip = 0;
        } else {
            skip -= frame.head.size();
        }
        Visit visit;
        for (const Piece& piece : frame.pieces) {
            const Slice& slice = job.slices[piece.slice];
            if (slice.direction != Direction::kWrite) continue;
            if (skip >= piece.length) {
                skip -= piece.length;
                continue;
            }
            if (!place(frame, piece, skip, visit, parts[count++])) return false;
            skip = 0;
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        ssize_t n = ::sendmsg(channel_.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        int error = errno;
        visit.end();
        if (n < 0) {
            if (error == EINTR) continue;
            if (error == EAGAIN) return true;
            // What the peer said before it closed is worth more than the broken pipe.
            // The peer closes after an ERROR, and our send may find the closed socket before we have read
            // why.
            bool read = false;
            if (receive_some(read)) return lost(error);
            return false;
        }
        moved = true;
        frame.sent += static_cast<uint64_t>(n);
        progress(frame);
        if (frame.sent == frame.total()) ++sent_;
    }
}

// ---- in

bool Run::receive_some(bool& moved) {
    // Bounded, so that an I/O thread with many connections comes to the others.
    for (int round = 0; round < 64 && !frames_.empty(); ++round) {
        Frame& frame = frames_.front();
        ssize_t n = receive_bytes(frame);
        if (n == 0) return broken(Code::kUnavailable, "the peer closed the connection");
        if (n == -1) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || lost(errno);
        }
        if (n < 0) return false;
        moved = true;
        progress(frame);
        have_ += static_cast<uint64_t>(n);
        if (!judge(frame)) return false;
        if (part_ == Part::kPayload && have_ == payload_bytes_) {
            settle(frame);
            drop_front();
            // Bytes behind the last answer that was asked for answer nothing.
            if (frames_.empty() && ahead_begin_ != ahead_end_) return misfit();
        }
    }
    return true;
}

// What the socket has of this part. -1: errno; -2: error().
ssize_t Run::receive_bytes(const Frame& frame) {
    if (part_ == Part::kHead) return receive_head(frame);
    if (part_ != Part::kPayload) {
        iovec rest{body_.data() + have_, body_.size() - have_};
        return pull(&rest, 1);
    }
    iovec parts[kIovecsMax];
    size_t count = 0;
    const Job& job = *frame.task->job;
    Visit visit;
    uint64_t skip = have_;
    for (size_t i = 0; i < frame.pieces.size(); ++i) {
        const Piece& piece = frame.pieces[i];
        if (job.slices[piece.slice].direction != Direction::kRead || is_refused(i)) continue;
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        if (!place(frame, piece, skip, visit, parts[count++])) return -2;
        skip = 0;
    }
    return pull(parts, count);
}

// With the payload, when it is small: one system call less.
ssize_t Run::receive_head(const Frame& frame) {
    size_t rest = kAnswerHeadBytes - have_;
    // The payload may not go to its destination yet: whether these bytes are payload only the head will
    // tell. At most a page is copied once more for that.
    iovec parts[2] = {{reinterpret_cast<std::byte*>(&head_) + have_, rest}, {ahead_, frame.read_bytes}};
    bool along = ahead_begin_ == ahead_end_ && frame.read_bytes != 0 && frame.read_bytes <= kAheadBytes;
    ssize_t n = pull(parts, along ? 2 : 1);
    if (n <= static_cast<ssize_t>(rest)) return n;
    ahead_begin_ = 0;
    ahead_end_ = static_cast<size_t>(n) - rest;
    return static_cast<ssize_t>(rest);
}

// What came along before, else what the socket has.
ssize_t Run::pull(iovec* parts, size_t count) {
    if (ahead_begin_ == ahead_end_) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        return ::recvmsg(channel_.fd.get(), &message, MSG_DONTWAIT);
    }
    size_t taken = 0;
    for (size_t i = 0; i < count && ahead_begin_ != ahead_end_; ++i) {
        size_t n = std::min(parts[i].iov_len, ahead_end_ - ahead_begin_);
        std::memcpy(parts[i].iov_base, ahead_ + ahead_begin_, n);
        ahead_begin_ += n;
        taken += n;
    }
    return static_cast<ssize_t>(taken);
}

// Decides which part is next once one is whole. False: the connection is of no use any more.
bool Run::judge(Frame& frame) {
    switch (part_) {
        case Part::kHead:
            return judge_head(frame);
        case Part::kError: {
            if (have_ < body_.size()) return true;
            Reader reader(body_);
            Error error = read_error(reader);
            return broken(error.code, error.text);
        }
        // Its last two bytes are the length of the reason, which follows.
        case Part::kStates: {
            if (have_ < body_.size()) return true;
            uint16_t text = 0;
            std::memcpy(&text, body_.data() + body_.size() - sizeof(text), sizeof(text));
            body_.resize(body_.size() + text);
            part_ = Part::kWhy;
            return have_ < body_.size() || judge_refusals(frame);
        }
        case Part::kWhy:
            return have_ < body_.size() || judge_refusals(frame);
        case Part::kPayload:
            return true;
    }
    return true;
}

bool Run::judge_head(Frame& frame) {
    if (have_ < sizeof(FrameHeader)) return true;
    const FrameHeader& header = head_.header;
    if (header.magic != kMagic || header.version != kVersion) {
        return broken(Code::kProtocol, "the peer does not speak the engine's protocol");
    }
    if (header.kind == Kind::kError) {  // it may be shorter than the head of a good answer
        if (header.length > kErrorBytesMax || header.length < kErrorBytesMin) {
            return broken(Code::kProtocol, "the peer sent a frame over the limit");
        }
        body_.resize(header.length);
        have_ = std::min<uint64_t>(have_ - sizeof(FrameHeader), body_.size());
        std::memcpy(body_.data(), &head_.rows, have_);
        part_ = Part::kError;
        return judge(frame);
    }
    if (header.kind != Kind::kEngineTransfer || header.request_id != frame.id ||
        // An answer to what is not sent in full can only be a peer's mistake.
        (header.flags & kFlagAnswer) == 0 || sent_ == 0) {
        return misfit();
    }
    if (have_ < kAnswerHeadBytes) return true;
    bool fits = head_.rows == frame.pieces.size() && head_.refused <= head_.rows;
    if (!fits || (head_.refused == 0 && header.length != 8 + frame.read_bytes)) {
        return misfit();
    }
    have_ = 0;
    if (head_.refused == 0) {
        part_ = Part::kPayload;
        payload_bytes_ = frame.read_bytes;
    } else {
        part_ = Part::kStates;
        body_.resize(head_.rows + kRefusalBytesMin);
    }
    return true;
}

bool Run::judge_refusals(Frame& frame) {
    Reader reader(body_);
    (void)reader.bytes(head_.rows);
    auto code = reader.number<uint16_t>();
    std::string why(reader.text16());
    uint64_t bytes = 0;
    for (size_t i = 0; i < frame.pieces.size(); ++i) {
        const Piece& piece = frame.pieces[i];
        bool read = frame.task->job->slices[piece.slice].direction == Direction::kRead;
        if (read && !is_refused(i)) bytes += piece.length;
    }
    if (!reader.done() || head_.header.length != 8 + body_.size() + bytes) {
        return broken(Code::kProtocol, "the peer sent an unreadable refusal");
    }
    // A later release may refuse with a code that is not known here.
    Code known = code <= static_cast<uint16_t>(Code::kOs) ? static_cast<Code>(code) : Code::kProtocol;
    refusal_ = Error{known, std::move(why)};
    have_ = 0;
    part_ = Part::kPayload;
    payload_bytes_ = bytes;
    return true;
}

// The frame was answered.
void Run::settle(Frame& frame) {
    Task& task = *frame.task;
    Job& job = *task.job;
    Tally tally(counters_);
    uint64_t bytes = 0;
    for (size_t i = 0; i < frame.pieces.size(); ++i) {
        const Piece& piece = frame.pieces[i];
        // Pieces are settled in the order in which they were asked for, so the pieces of one slice follow
        // each other.
        if (!job.is_waiting(piece.slice)) continue;  // an earlier piece of it was refused
        if (is_refused(i)) {
            job.fail(piece.slice, refusal_.code, refusal_.text);
            bytes -= task.partial;
            task.partial = 0;
            continue;
        }
        const Slice& slice = job.slices[piece.slice];
        bytes += piece.length - piece.back;
        task.partial += piece.length - piece.back;
        if (!piece.last) continue;
        if (task.partial != slice.length) {  // whatever was asked for, a slice with a hole is not done
            job.fail(piece.slice, Code::kProtocol, "internal error: bytes of the slice were left out");
            bytes -= task.partial;
            task.partial = 0;
            continue;
        }
        // Every piece was answered, also the ones before this: it is the last of its slice.
        tally.count(slice.direction == Direction::kWrite, slice.length);
        task.partial = 0;
        job.done(piece.slice);
    }
    job.bytes_done.fetch_add(bytes, std::memory_order_relaxed);
}

void Run::drop_front() {
    Frame& frame = frames_.front();
    --frame.task->frames;
    bytes_open_ -= frame.bytes();
    if (spare_.size() < kWindowFrames) {
        frame.task.reset();
        frame.head.clear();
        frame.pieces.clear();
        frame.write_bytes = frame.read_bytes = frame.sent = 0;
        spare_.push_back(std::move(frame));
    }
    frames_.pop_front();
    --sent_;
    part_ = Part::kHead;
    have_ = 0;
    body_.clear();
}

// ---- ends

void Run::end_jobs(std::deque<std::shared_ptr<Task>>& tasks) {
    for (size_t i = 0; i < tasks.size();) {
        std::shared_ptr<Task> task = tasks[i];
        // A cancelled job waits for the answers to what it has asked: the peer may be writing its bytes.
        if (!task->asked_all && task->job->stopped()) task->asked_all = true;
        if (!task->asked_all || task->frames != 0) {
            ++i;
            continue;
        }
        tasks.erase(tasks.begin() + static_cast<ptrdiff_t>(i));
        if (task->finished) task->finished(task->job, success());
    }
}

void Run::progress(const Frame& frame) {
    moved_ns_ = now_ns();
    frame.task->job->progress_ns.store(moved_ns_, std::memory_order_relaxed);
}

bool Run::check(uint64_t now, int stall_ms) {
    for (auto* tasks : {&foreground_, &background_}) {
        for (const auto& task : *tasks) {
            if (!task->job->stopped()) continue;
            task->asked_all = true;
            if (task->stopped_ns == 0) task->stopped_ns = now;
            // A peer that does not answer would hold a cancelled job for the whole timeout. Giving up the
            // connection fails the jobs beside it, which the link repeats on another one.
            if (task->job->closing->load() || now - task->stopped_ns > kCancelNs)
                return broken(Code::kUnavailable, "cancelled");
        }
    }
    // Bytes that the peer's kernel acknowledged are progress, too, though we see nothing of it otherwise.
    int left = 0;
    if (::ioctl(channel_.fd.get(), SIOCOUTQ, &left) == 0 && left != unacknowledged_) {
        if (unacknowledged_ >= 0 && left < unacknowledged_ && !frames_.empty()) {
            progress(frames_[std::min(sent_, frames_.size() - 1)]);
        }
        unacknowledged_ = left;
    }
    if (moved_ns_ > now || now - moved_ns_ <= static_cast<uint64_t>(stall_ms) * 1000000) return true;
    return broken(Code::kTimeout, "no progress within " + std::to_string(stall_ms) + " ms");
}

void Run::fail() {
    std::deque<std::shared_ptr<Task>> tasks = std::move(foreground_);
    tasks.insert(tasks.end(), background_.begin(), background_.end());
    foreground_.clear();
    background_.clear();
    frames_.clear();
    sent_ = 0;
    for (const auto& task : tasks) {
        // What came of a slice that is not whole does not count: another connection moves all of it.
        task->job->bytes_done.fetch_sub(task->partial, std::memory_order_relaxed);
        if (task->finished) task->finished(task->job, error_);
    }
}

bool Run::misfit() {
    return broken(Code::kProtocol, "the peer sent an answer that does not fit the question");
}

bool Run::lost(int error) {
    return broken(Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(error));
}

bool Run::broken(Code code, std::string text) {
    error_ = Error{code, std::move(text)};
    return false;
}

}  // namespace moonpool::transport::tcp
