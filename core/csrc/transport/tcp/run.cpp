// Run: gives frames of the queue their heads, sends them, and takes the answers apart.
//
// Thread: the one that drives the channel at the time, a caller or an I/O thread; Run has no lock. No call
// blocks.
//
// Between two calls: frames_[0, sent_) are sent and unanswered, frames_[sent_] may be half sent, and no
// later one has begun. part_ and have_ say how far the answer to frames_.front() has come; nothing of an
// answer lies anywhere but in head_, body_, ahead_ or at its destination. A frame with bytes of writes has
// its task until it is answered; any other may have lost it, and its answer is thrown away.
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
#include <climits>
#include <cstring>
#include <iterator>

#include "base/tsan.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr size_t kWindowFrames = 8;
constexpr size_t kWindowFramesBackground = 2;
constexpr int kIovecsMax = 1024;        // in one system call, the kernel's limit
constexpr uint32_t kErrorBytesMin = 4;  // u16 code, text16
constexpr uint32_t kErrorBytesMax = 65600;
constexpr size_t kRefusalBytesMin = 4;     // behind the byte of each row: u16 code, text16
constexpr int kFenceMs = 10000;            // the peer waits for its cards before it answers
constexpr uint64_t kSilentNs = 200000000;  // of a connection to which others are preferred
constexpr size_t kAnswerStepBytes = 256u << 10;

// Where bytes go that no task wants any more.
constexpr size_t kNowhereBytes = 65536;
std::byte* nowhere() {
    static thread_local std::byte bytes[kNowhereBytes];
    return bytes;
}

}  // namespace

short Run::wants() const { return static_cast<short>(sending() ? POLLIN | POLLOUT : POLLIN); }

bool Run::has_room() const {
    return frames_open() < kWindowFrames && bytes_open() < kWindowFrames * channel_.frame_bytes;
}

bool Run::is_silent(uint64_t now) const { return frames_open() != 0 && now > moved_ns_ + kSilentNs; }

// Sends before it receives: the peer works while the answers to earlier frames are read.
Run::Step Run::step() {
    bool moved = false;
    if (!send_some(moved)) return Step::kFailed;
    if (frames_.empty()) return Step::kNothing;
    if (!receive_some(moved)) return Step::kFailed;
    return moved ? Step::kMoved : Step::kIdle;
}

// ---- out

// The window bounds what a connection that fails has to repeat, and what a job of the foreground waits
// behind: that is why the background has a smaller one.
bool Run::make_frame() {
    bool full = !has_room();
    if (full) ask_for_help(channel_.frame_bytes);
    Frame frame;
    if (!spare_.empty()) {
        frame = std::move(spare_.back());
        spare_.pop_back();
    }
    Queue::Room room{channel_.frame_bytes, !full, !full && frames_.size() < kWindowFramesBackground,
                     fencing_};
    if (!queue_.fill(frame, connection_, room)) {
        spare_.push_back(std::move(frame));
        return false;
    }
    frame.id = channel_.next_request++;
    write_head(frame);
    // From here on the frame counts as under way, though none of it is sent.
    if (frames_.empty()) moved_ns_ = now_ns();
    if (frame.kind == Frame::Kind::kFence) fencing_ = true;
    bytes_open_.fetch_add(frame.bytes(), std::memory_order_relaxed);
    // Set before the first byte: a connection that carried a write is fenced when it is given up.
    if (frame.write_bytes != 0) channel_.wrote = true;
    asked_for_help_ = false;
    frames_.push_back(std::move(frame));
    frames_open_.store(frames_.size(), std::memory_order_relaxed);
    return true;
}

void Run::ask_for_help(uint64_t bytes_left) {
    if (!std::exchange(asked_for_help_, true)) wants_help_ = queue_.share(connection_, bytes_left);
}

void Run::write_head(Frame& frame) {
    if (frame.kind == Frame::Kind::kTransfer) {
        frame.head.resize(kTransferHeadBytes + frame.pieces.size() * sizeof(TransferRow));
        auto rows = static_cast<uint32_t>(frame.pieces.size());
        uint32_t zero = 0;
        std::byte* out = frame.head.data() + sizeof(FrameHeader);
        std::memcpy(out, &rows, sizeof(rows));
        std::memcpy(out + 4, &zero, sizeof(zero));
        out += kTransferHeadBytes - sizeof(FrameHeader);
        for (const Piece& piece : frame.pieces) {
            const Slice& slice = Queue::job(*frame.task).slices[piece.slice];
            TransferRow row{slice.remote + piece.at, piece.length, static_cast<uint32_t>(slice.direction)};
            std::memcpy(out, &row, sizeof(row));
            out += sizeof(row);
        }
    }
    FrameHeader header;
    header.kind = frame.kind == Frame::Kind::kTransfer ? Kind::kEngineTransfer : frame.wire;
    header.request_id = frame.id;
    header.length = static_cast<uint32_t>(frame.total() - sizeof(header));
    std::memcpy(frame.head.data(), &header, sizeof(header));
}

Visit::Access Run::place(const Frame& frame, const Piece& piece, uint64_t skip, Visit& visit, iovec& part) {
    const Job& job = Queue::job(*frame.task);
    const Slice& slice = job.slices[piece.slice];
    uint64_t bytes = piece.length - skip;
    part = {reinterpret_cast<void*>(slice.local + piece.at + skip), bytes};
    auto access = visit.reach(*job.locals[piece.slice], slice.local, slice.length, piece.at + skip, bytes);
    if (access == Visit::Access::kOutside) (void)broken(Code::kProtocol, kOutsideText);
    return access;
}

// Inside TLS: whether the user may have unmapped its memory, so that no code of ours may copy there.
bool Run::may_unmap(const Frame& frame, const Piece& piece) const {
    return channel_.tls != nullptr && !Queue::job(*frame.task).locals[piece.slice]->stays_mapped();
}

bool Run::send_some(bool& moved) {
    // Of what TLS took before; a frame that is sent may be among it.
    if (channel_.socket().unsent() && !channel_.tls->flush(channel_.fd.get()) && errno != EAGAIN) {
        return unsendable(errno);
    }
    for (;;) {
        if (sent_ == frames_.size() && !make_frame()) return true;
        Frame& frame = frames_[sent_];
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
        bool may_fault = false;
        auto access = Visit::Access::kGranted;
        for (const Piece& piece : frame.pieces) {
            if (piece.read) continue;
            if (skip >= piece.length) {
                skip -= piece.length;
                continue;
            }
            access = place(frame, piece, skip, visit, parts[count++]);
            if (access != Visit::Access::kGranted) break;
            may_fault |= may_unmap(frame, piece);
            skip = 0;
        }
        if (access == Visit::Access::kOutside) return false;
        if (access == Visit::Access::kClosing) {
            // Bytes that were promised to the peer: the connection is of no use any more.
            if (frame.sent != 0) return broken(Code::kUnavailable, "a local region was deregistered");
            visit.end();
            queue_.take_back(frame);  // which fails the slices of that region, and asks for the others again
            drop(sent_);
            continue;
        }
        ssize_t n = channel_.socket().send(parts, count, may_fault);
        int error = errno;
        visit.end();
        if (n < 0) {
            if (error == EINTR) continue;
            if (error == EAGAIN) {
                // The socket takes no more of a write: what a window holds is better left to this channel.
                ask_for_help(kWindowFrames * channel_.frame_bytes);
                return true;
            }
            return unsendable(error);
        }
        moved = true;
        frame.sent += static_cast<uint64_t>(n);
        if (frame.write_bytes != 0) {
            progress(frame);
        } else {
            moved_ns_.store(now_ns(), std::memory_order_relaxed);
        }
        if (frame.sent == frame.total()) ++sent_;
    }
}

// What the peer said before it closed is worth more than the broken pipe: it closes after an ERROR, and our
// send may find the closed socket before we have read why.
bool Run::unsendable(int error) {
    bool read = false;
    if (receive_some(read)) return lost(error);
    return false;
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
        if (channel_.socket().unsent_bytes() > kUnsentBytesMax) {
            return broken(Code::kProtocol, "the peer asks for new keys of TLS, and reads nothing");
        }
        moved = true;
        progress(frame);
        have_ += static_cast<uint64_t>(n);
        if (!judge(frame)) return false;
        if ((part_ == Part::kPayload || part_ == Part::kAnswer) && have_ == payload_bytes_) {
            if (part_ == Part::kAnswer && !judge_answer(frame)) return false;
            if (part_ == Part::kPayload) queue_.settle(frame, body_, refusal_);
            drop(0);
            // Bytes behind the last answer that was asked for answer nothing.
            if (frames_.empty() && (ahead_begin_ != ahead_end_ || channel_.socket().pending())) {
                return misfit();
            }
        }
    }
    return true;
}

// What the socket has of this part. -1: errno; -2: error().
ssize_t Run::receive_bytes(Frame& frame) {
    if (part_ == Part::kHead) return receive_head(frame);
    if (part_ == Part::kPayload) return receive_payload(frame);
    if (part_ == Part::kAnswer) {  // memory follows the bytes that came
        body_.resize(std::min<uint64_t>(payload_bytes_, have_ + kAnswerStepBytes));
    }
    iovec rest{body_.data() + have_, body_.size() - have_};
    return pull(&rest, 1);
}

ssize_t Run::receive_payload(Frame& frame) {
    iovec parts[kIovecsMax];
    size_t count = 0;
    Visit visit;
    bool may_fault = false;
    uint64_t skip = have_;
    for (size_t i = 0; i < frame.pieces.size(); ++i) {
        Piece& piece = frame.pieces[i];
        if (!piece.read || is_refused(i)) continue;
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        // The piece before it brings these, perhaps over another connection and at this moment.
        if (skip < piece.back) {
            parts[count++] = {nowhere(), piece.back - skip};
            skip = piece.back;
        }
        if (frame.task != nullptr && !piece.lost) {
            auto access = place(frame, piece, skip, visit, parts[count]);
            if (access == Visit::Access::kOutside) return -2;
            piece.lost = access == Visit::Access::kClosing;
            may_fault |= may_unmap(frame, piece);
        }
        uint64_t left = piece.length - skip;
        if (frame.task == nullptr || piece.lost) {
            parts[count] = {nowhere(), std::min<uint64_t>(left, kNowhereBytes)};
        }
        if (parts[count++].iov_len != left) break;
        skip = 0;
    }
    OrderedByThePeer scope;  // slices may share a destination
    return pull(parts, count, may_fault);
}

// With the payload, when it is small: one system call less.
ssize_t Run::receive_head(const Frame& frame) {
    bool question = frame.kind != Frame::Kind::kTransfer;
    size_t rest = (question ? sizeof(FrameHeader) : kAnswerHeadBytes) - have_;
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

// What came along before, else what the socket has. may_fault: as SecureSocket has it.
ssize_t Run::pull(iovec* parts, size_t count, bool may_fault) {
    if (ahead_begin_ == ahead_end_) return channel_.socket().receive(parts, count, may_fault, nullptr);
    if (may_fault) {
        ssize_t n =
            channel_.socket().put(parts, count, ahead_ + ahead_begin_, ahead_end_ - ahead_begin_, nullptr);
        ahead_begin_ += static_cast<size_t>(std::max<ssize_t>(n, 0));
        return n;
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
        case Part::kAnswer:
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
    if (frame.kind != Frame::Kind::kTransfer) {
        // An ERROR without its number is the connection's last.
        bool error = header.kind == Kind::kError && (header.request_id == frame.id || header.request_id == 0);
        bool fits = header.kind == frame.wire && header.request_id == frame.id &&
                    (header.flags & kFlagAnswer) != 0 && header.length <= kControlBytesMax;
        if (sent_ == 0 || !(error ? header.length <= kErrorBytesMax : fits)) return misfit();
        have_ = 0;
        part_ = Part::kAnswer;
        payload_bytes_ = header.length;
        return true;
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
        if (frame.pieces[i].read && !is_refused(i)) bytes += frame.pieces[i].length;
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

// Of a question or a fence, all of it.
bool Run::judge_answer(Frame& frame) {
    body_.resize(payload_bytes_);
    if (head_.header.kind != Kind::kError) {
        if (frame.kind == Frame::Kind::kFence) {
            queue_.fenced(frame);
        } else {
            queue_.answer(frame, std::move(body_));
        }
        return true;
    }
    Reader reader(body_);
    Error error = read_error(reader);
    if (frame.kind == Frame::Kind::kFence || head_.header.request_id == 0)
        return broken(error.code, error.text);
    queue_.answer(frame, std::move(error));
    return true;
}

// Answered, or not begun.
void Run::drop(size_t number) {
    Frame& frame = frames_[number];
    bytes_open_.fetch_sub(frame.bytes(), std::memory_order_relaxed);
    if (frame.kind == Frame::Kind::kFence) fencing_ = false;
    if (number < sent_) {
        --sent_;
        part_ = Part::kHead;
        have_ = 0;
        body_.clear();
    }
    if (spare_.size() < kWindowFrames) {
        frame.task.reset();
        frame.head.clear();
        frame.pieces.clear();
        frame.write_bytes = frame.read_bytes = frame.sent = 0;
        spare_.push_back(std::move(frame));
    }
    frames_.erase(frames_.begin() + static_cast<ptrdiff_t>(number));
    frames_open_.store(frames_.size(), std::memory_order_relaxed);
}

// ---- ends

// A question in the buffers of a socket is none: the kernel takes it for a peer that has stopped, too.
void Run::progress(const Frame& frame) {
    uint64_t now = now_ns();
    moved_ns_.store(now, std::memory_order_relaxed);
    progress_ns_ = now;
    queue_.progress(frame, now);
}

bool Run::check(uint64_t now) {
    // Bytes that the peer's kernel acknowledged are progress, too, though we see nothing of it otherwise.
    int left = 0;
    if (::ioctl(channel_.fd.get(), SIOCOUTQ, &left) == 0 && left != unacknowledged_) {
        if (unacknowledged_ >= 0 && left < unacknowledged_ && !frames_.empty()) {
            const Frame& frame = frames_[std::min(sent_, frames_.size() - 1)];
            if (frame.write_bytes != 0) progress(frame);
        }
        unacknowledged_ = left;
    }
    uint64_t moved_ns = moved_ns_;
    int patience_ms = INT_MAX;
    for (size_t i = 0; i < frames_.size();) {
        Frame& frame = frames_[i];
        int wait_ms = frame.kind == Frame::Kind::kFence ? kFenceMs : INT_MAX;
        if (frame.task != nullptr) {
            Queue::State state = queue_.state_of(*frame.task, now, progress_ns_);
            bool begun = i < sent_ || frame.sent != 0;
            if (state == Queue::State::kGoesOn) {
                wait_ms = Queue::patience_ms(*frame.task);
            } else if (frame.write_bytes == 0 || !begun) {
                queue_.abandon(frame);
                if (!begun) {
                    drop(i);
                    continue;
                }
            } else if (state == Queue::State::kClosing) {
                return broken(Code::kUnavailable, "cancelled");
            } else {
                wait_ms = kStillMs;
            }
        }
        patience_ms = std::min(patience_ms, wait_ms);
        ++i;
    }
    if (patience_ms == INT_MAX) patience_ms = kStillMs;  // answers that are of no use to any job
    if (frames_.empty() || moved_ns > now || (now - moved_ns) / 1000000 < static_cast<uint64_t>(patience_ms))
        return true;
    return broken(Code::kTimeout, "nothing moved for " + std::to_string((now - moved_ns) / 1000000) + " ms");
}

void Run::fail(const Error& error) {
    std::vector<Frame> frames(std::make_move_iterator(frames_.begin()),
                              std::make_move_iterator(frames_.end()));
    frames_.clear();
    sent_ = 0;
    queue_.give_back(frames, error);
}

bool Run::misfit() {
    return broken(Code::kProtocol, "the peer sent an answer that does not fit the question");
}

bool Run::lost(int error) {
    if (error == EPROTO && channel_.tls != nullptr) {
        error_ = channel_.tls->error("the peer");
        return false;
    }
    return broken(Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(error));
}

bool Run::broken(Code code, std::string text) {
    error_ = Error{code, std::move(text)};
    return false;
}

}  // namespace moonpool::transport::tcp
