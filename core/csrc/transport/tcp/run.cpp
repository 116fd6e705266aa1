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

constexpr uint64_t kFrameBytes = 2u << 20;  // what a foreground frame may wait behind is a few of these
constexpr uint64_t kBackgroundFrameBytes = 512u << 10;
constexpr size_t kWindowFrames = 8;
constexpr uint64_t kWindowBytes = 16u << 20;
constexpr size_t kWindowFramesBackground = 2;
constexpr uint64_t kCancelNs = 1000000000;  // then a cancelled job takes the connection with it
constexpr int kRangesMax = 1024;            // in one system call, the kernel's limit

}  // namespace

void Run::add(std::shared_ptr<Job> job, Finished finished) {
    auto task = std::make_shared<Task>();
    task->job = std::move(job);
    task->finished = std::move(finished);
    if (jobs() == 0) moved_ns_ = now_ns();
    (task->job->background ? background_ : foreground_).push_back(std::move(task));
}

short Run::wants() const { return static_cast<short>(sending() ? POLLIN | POLLOUT : POLLIN); }

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
bool Run::make_frame() {
    if (frames_.size() >= kWindowFrames || bytes_open_ >= kWindowBytes) return false;
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
    uint64_t room = job.background ? kBackgroundFrameBytes : kFrameBytes;
    while (task->slice < job.slices.size() && frame.pieces.size() < kRowsMax && room != 0) {
        const Slice& slice = job.slices[task->slice];
        uint64_t n = std::min(slice.length - task->at, room);
        if (!job.is_waiting(task->slice)) {
            ++task->slice;
            continue;
        }
        bool last = task->at + n == slice.length;
        frame.pieces.push_back(
            {static_cast<uint32_t>(task->slice), static_cast<uint32_t>(n), task->at, last});
        (slice.direction == Direction::kWrite ? frame.write_bytes : frame.read_bytes) += n;
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
    ++task->frames;
    bytes_open_ += frame.bytes();
    if (frame.write_bytes != 0) channel_.wrote = true;
    frames_.push_back(std::move(frame));
    return true;
}

bool Run::send_some(bool& moved) {
    for (;;) {
        if (sent_ == frames_.size() && !make_frame()) return true;
        Frame& frame = frames_[sent_];
        Job& job = *frame.task->job;
        iovec parts[kRangesMax];
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
            if (!visit.enter(*job.locals[piece.slice])) {
                return broken(Code::kInvalidArgument, "the local region was deregistered");
            }
            parts[count++] = {reinterpret_cast<void*>(slice.local + piece.at + skip), piece.length - skip};
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
    for (int round = 0; round < 64 && !frames_.empty(); ++round) {
        ssize_t n;
        Frame& frame = frames_.front();
        if (taking_back_) {
            iovec rest{body_.data() + body_have_, body_.size() - body_have_};
            n = pull(&rest, 1);
        } else {
            n = receive_answer(frame);
            if (n == -2) return broken(Code::kInvalidArgument, "the local region was deregistered");
        }
        if (n == 0) return broken(Code::kUnavailable, "the peer closed the connection");
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || lost(errno);
        }
        moved = true;
        progress(frame);
        if (taking_back_) {
            body_have_ += static_cast<size_t>(n);
            if (body_have_ == body_.size() && !finish_refusals(frame)) return false;
            continue;
        }
        auto size = static_cast<uint64_t>(n);
        if (head_have_ < kAnswerHeadBytes) {
            uint64_t part = std::min<uint64_t>(size, kAnswerHeadBytes - head_have_);
            head_have_ += part;
            size -= part;
            // An ERROR may be shorter than the head of a good answer.
            if (head_have_ >= sizeof(FrameHeader) && !judge_head(frame)) {
                if (!taking_back_) return false;
                if (!take_back(frame, size)) return false;
                continue;
            }
            if (head_have_ < kAnswerHeadBytes) continue;
        }
        payload_have_ += size;
        if (payload_have_ == frame.read_bytes) {
            settle(frame, nullptr, Error{});
            drop_front();
        }
    }
    return true;
}

ssize_t Run::receive_answer(Frame& frame) {
    iovec parts[kRangesMax];
    size_t count = 0;
    if (head_have_ < kAnswerHeadBytes) {
        parts[count++] = {reinterpret_cast<std::byte*>(&head_) + head_have_, kAnswerHeadBytes - head_have_};
    }
    Job& job = *frame.task->job;
    Visit visit;
    uint64_t skip = payload_have_;
    for (const Piece& piece : frame.pieces) {
        if (frame.read_bytes == 0) break;
        const Slice& slice = job.slices[piece.slice];
        if (slice.direction != Direction::kRead) continue;
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        if (!visit.enter(*job.locals[piece.slice])) return -2;
        parts[count++] = {reinterpret_cast<void*>(slice.local + piece.at + skip), piece.length - skip};
        skip = 0;
    }
    return pull(parts, count);
}

// What the socket has, behind what was already taken out of it.
ssize_t Run::pull(iovec* parts, size_t count) {
    if (ahead_.empty()) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        return ::recvmsg(channel_.fd.get(), &message, MSG_DONTWAIT);
    }
    size_t taken = 0;
    for (size_t i = 0; i < count && taken < ahead_.size(); ++i) {
        size_t n = std::min(parts[i].iov_len, ahead_.size() - taken);
        std::memcpy(parts[i].iov_base, ahead_.data() + taken, n);
        taken += n;
    }
    ahead_.erase(ahead_.begin(), ahead_.begin() + static_cast<ptrdiff_t>(taken));
    return static_cast<ssize_t>(taken);
}

// True: as expected, so far. False with taking_back_: the answer has another body.
bool Run::judge_head(Frame& frame) {
    const FrameHeader& header = head_.header;
    if (header.magic != kMagic || header.version != kVersion) {
        return broken(Code::kProtocol, "the peer does not speak the engine's protocol");
    }
    bool error = header.kind == Kind::kError;
    if (!error && (header.kind != Kind::kEngineTransfer || header.request_id != frame.id ||
                   (header.flags & kFlagAnswer) == 0 || sent_ == 0)) {
        return broken(Code::kProtocol, "the peer sent an answer that does not fit the question");
    }
    if (!error && head_have_ < kAnswerHeadBytes) return true;
    if (!error && head_.refused == 0) {
        if (head_.rows != frame.pieces.size() || header.length != 8 + frame.read_bytes) {
            return broken(Code::kProtocol, "the peer sent an answer that does not fit the question");
        }
        return true;
    }
    uint64_t limit = error ? 65600 : 8 + frame.pieces.size() + 4 + 65535 + frame.read_bytes;
    if (header.length > limit || header.length < (error ? 4 : 8)) {
        return broken(Code::kProtocol, "the peer sent a frame over the limit");
    }
    taking_back_ = true;
    return false;
}

// `early` bytes went where those of a good answer belong: the first of them are the body's, the others belong
// to the answers behind it.
bool Run::take_back(Frame& frame, uint64_t early) {
    body_.resize(head_.header.length);
    body_have_ = std::min<size_t>(head_have_ - sizeof(FrameHeader), body_.size());
    std::memcpy(body_.data(), &head_.rows, body_have_);
    std::vector<std::byte> found(reinterpret_cast<std::byte*>(&head_.rows) + body_have_,
                                 reinterpret_cast<std::byte*>(&head_) + head_have_);
    Job& job = *frame.task->job;
    Visit visit;
    for (const Piece& piece : frame.pieces) {
        const Slice& slice = job.slices[piece.slice];
        if (early == 0) break;
        if (slice.direction != Direction::kRead) continue;
        uint64_t n = std::min<uint64_t>(early, piece.length);
        if (!visit.enter(*job.locals[piece.slice])) {
            return broken(Code::kInvalidArgument, "the local region was deregistered");
        }
        auto* bytes = reinterpret_cast<const std::byte*>(slice.local + piece.at);
        found.insert(found.end(), bytes, bytes + n);
        early -= n;
    }
    ahead_.insert(ahead_.begin(), found.begin(), found.end());
    if (body_have_ < body_.size() && !ahead_.empty()) {
        iovec rest{body_.data() + body_have_, body_.size() - body_have_};
        body_have_ += static_cast<size_t>(pull(&rest, 1));
    }
    return body_have_ < body_.size() || finish_refusals(frame);
}

bool Run::finish_refusals(Frame& frame) {
    taking_back_ = false;
    if (head_.header.kind == Kind::kError) {
        Reader reader(body_);
        Error error = read_error(reader);
        return broken(error.code, error.text);
    }
    Reader reader(body_);
    auto rows = reader.number<uint32_t>();
    auto refused = reader.number<uint32_t>();
    std::string_view states = reader.bytes(rows);
    auto code = reader.number<uint16_t>();
    std::string why(reader.text16());
    if (!reader.ok() || rows != frame.pieces.size() || refused > rows) {
        return broken(Code::kProtocol, "the peer sent an unreadable refusal");
    }
    Job& job = *frame.task->job;
    for (size_t i = 0; i < rows; ++i) {
        const Piece& piece = frame.pieces[i];
        const Slice& slice = job.slices[piece.slice];
        if (slice.direction != Direction::kRead || states[i] != 0) continue;
        std::string_view bytes = reader.bytes(piece.length);
        Visit visit;
        if (bytes.size() != piece.length) {
            return broken(Code::kProtocol, "the peer sent an unreadable refusal");
        }
        if (!visit.enter(*job.locals[piece.slice])) {
            return broken(Code::kInvalidArgument, "the local region was deregistered");
        }
        std::memcpy(reinterpret_cast<void*>(slice.local + piece.at), bytes.data(), bytes.size());
    }
    if (!reader.done()) return broken(Code::kProtocol, "the peer sent an unreadable refusal");
    Code known = code <= static_cast<uint16_t>(Code::kOs) ? static_cast<Code>(code) : Code::kProtocol;
    settle(frame, reinterpret_cast<const uint8_t*>(states.data()), Error{known, why});
    drop_front();
    return true;
}

// The frame was answered.
void Run::settle(Frame& frame, const uint8_t* refused, const Error& why) {
    Task& task = *frame.task;
    Job& job = *task.job;
    Tally tally(counters_.tcp);
    uint64_t bytes = 0;
    for (size_t i = 0; i < frame.pieces.size(); ++i) {
        const Piece& piece = frame.pieces[i];
        if (!job.is_waiting(piece.slice)) continue;  // an earlier piece of it was refused
        if (refused != nullptr && refused[i] != 0) {
            job.fail(piece.slice, why.code, why.text);
            bytes -= task.partial;
            task.partial = 0;
            continue;
        }
        const Slice& slice = job.slices[piece.slice];
        bytes += piece.length;
        task.partial += piece.length;
        if (!piece.last) continue;
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
    head_have_ = 0;
    payload_have_ = 0;
    body_have_ = 0;
}

// ---- ends

void Run::end_jobs(std::deque<std::shared_ptr<Task>>& tasks) {
    for (size_t i = 0; i < tasks.size();) {
        std::shared_ptr<Task> task = tasks[i];
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
        task->job->bytes_done.fetch_sub(task->partial, std::memory_order_relaxed);
        if (task->finished) task->finished(task->job, error_);
    }
}

bool Run::lost(int error) {
    return broken(Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(error));
}

bool Run::broken(Code code, std::string text) {
    error_ = Error{code, std::move(text)};
    return false;
}

}  // namespace moonpool::transport::tcp
