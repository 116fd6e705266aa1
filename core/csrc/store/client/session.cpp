// The socket half of Session: one question at a time, its answer, the bytes of READ and PUT, and the one-
// way frames that ride along. session_open.cpp begins a session.
//
// Threads: any caller's; the session has none of its own. A call takes its turn at the socket by io_mutex_
// and keeps it until its answer is whole. Bytes of the arena are copied without any lock, by the path.
//
// What holds between two calls: with io_mutex_ free the socket stands between two frames in both
// directions, or the session is dead (alive_ is false): a call that stops in the middle of a frame, for
// whatever reason, ends the session by lost(). A dead session never lives again; its descriptor stays open
// until the last reference is gone, because the node keeps the pins of views that long. unsent_ holds
// whole one-way frames that the socket has not taken.
//
// Locks: io_mutex_, then posted_mutex_. A thread that posts takes io_mutex_ only by try_lock, so posting
// never waits for a node; the thread that has io_mutex_ sends what was posted when it lets go.
#include "store/client/session.hpp"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/peer_process.hpp"
#include "memory/copier.hpp"
#include "wire/address.hpp"
#include "wire/dial.hpp"

namespace moonpool {

namespace {

constexpr size_t kReadSlotsMax = 256;    // reads told to the node in one frame
constexpr size_t kPostedMax = 1u << 20;  // bytes of one-way frames, then puts wait for the node again

// How long a caller polls for its answer before it sleeps. A sleeping thread in a virtual machine is woken in
// 20-50 us, several times what the node needs to answer.
constexpr std::chrono::microseconds kSpin{50};

// Beyond it the bytes of a frame take longer than being woken does, and the kernel gathers the next ones
// meanwhile: a caller that polls for them burns a core that the other side, or an engine, could have.
constexpr uint64_t kSpinBytesMax = 128u << 10;

// Attempts to receive for a while, without sleeping. -1, and EAGAIN: nothing came.
template <class Attempt>
ssize_t spin(const Attempt& attempt) {
    static const bool alone = std::thread::hardware_concurrency() < 2;
    errno = EAGAIN;
    if (alone) return -1;
    auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        ssize_t n = attempt();
        if (n >= 0 || errno != EAGAIN) return n;
        ::sched_yield();  // the node may wait for this very core
    } while (std::chrono::steady_clock::now() < end);
    errno = EAGAIN;
    return -1;
}

// A call that a signal breaks off waits the socket's whole timeout anew: many of them, as a profiler's, would
// make it last for ever.
class Signals {
   public:
    explicit Signals(int fd) : fd_(fd) {}

    // After a call that failed: whether it is to be made again. Beyond the timeout, from the first signal on,
    // errno says so.
    bool again() {
        if (errno != EINTR) return false;
        auto now = std::chrono::steady_clock::now();
        if (!waiting_) since_ = now;
        waiting_ = true;
        if (now - since_ < timeout()) return true;
        errno = EAGAIN;
        return false;
    }
    void moved() { waiting_ = false; }

   private:
    std::chrono::microseconds timeout() const {
        timeval tv{};
        socklen_t size = sizeof(tv);
        ::getsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &tv, &size);  // that of sends is the same
        return std::chrono::seconds(tv.tv_sec) + std::chrono::microseconds(tv.tv_usec);
    }

    int fd_;
    bool waiting_ = false;
    std::chrono::steady_clock::time_point since_{};
};

Error no_time_left(const std::string& peer) {
    return Error{Code::kTimeout, "others left no time of this call to ask " + peer};
}

Error forked() {
    return Error{Code::kForked, "this handle belongs to the parent process; open a new one after fork"};
}

}  // namespace

// A call's hold of the socket. To wait for another thread's call that ends for nothing is to wait for the
// node.
class SCOPED_CAPABILITY Session::IoLock {
   public:
    explicit IoLock(Session& session) ACQUIRE(session.io_mutex_) : mutex_(session.io_mutex_) {
        if (mutex_.try_lock()) return;
        auto since = std::chrono::steady_clock::now();
        mutex_.lock();
        if (!session.alive()) WaitBudget::spent_since(since);
    }
    ~IoLock() RELEASE() { mutex_.unlock(); }
    IoLock(const IoLock&) = delete;

   private:
    Mutex& mutex_;
};

// A call's turn at the socket, with io_mutex_ held, which the analysis does not see: it waits no longer than
// its caller's budget lasts.
class Session::Turn {
   public:
    // timeout_ms: of the call; 0: as the session was opened.
    Turn(Session& session, int timeout_ms) REQUIRES(session.io_mutex_) : session_(session) {
        int wait = timeout_ms > 0 ? session.one_wait(timeout_ms) : session.timeout_ms_;
        session.waits_ms_ = WaitBudget::within(wait);
        // It stays for the next call, whose wait mostly is the same: two system calls cost as much as a
        // third of a message.
        if (any() && session.waits_ms_ != session.socket_ms_) {
            session.socket_ms_ = session.waits_ms_;
            set_socket_timeouts(session.fd_.get(), session.socket_ms_);
        }
    }
    ~Turn() { session_.waits_ms_ = session_.timeout_ms_; }
    Turn(const Turn&) = delete;

    bool any() const NO_THREAD_SAFETY_ANALYSIS { return session_.waits_ms_ > 0; }

   private:
    Session& session_;
};

Session::~Session() {
    // Releases of pins and returns of slabs may still wait to be sent: the node has them sooner than by
    // the end of the connection.
    bool was_alive = alive_.exchange(false);
    if (fd_.valid()) {  // else we are in a child of fork()
        if (was_alive) {
            MutexLock lock(io_mutex_);
            drain(true);
        }
        ::shutdown(fd_.get(), SHUT_RDWR);
    }
}

bool Session::check_alive() {
    if (!alive()) return false;
    char byte;
    ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) alive_.store(false);
    // What a node says unasked are its last words. While a call is in progress they may be the answer to it.
    if (n > 0 && io_mutex_.try_lock()) {
        MutexLock lock(io_mutex_, std::adopt_lock);
        if (::recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0) alive_.store(false);
    }
    return alive();
}

Fd Session::node_process() const {
    return pid_behind(fd_.get()) == ::getpid() ? Fd() : process_behind(fd_.get());
}

void Session::retire() {
    flush_reads();
    path_->retire();
}

// The socket stays open until the last view is gone: a node that was merely late keeps our pins that long, so
// no view shows memory that has become another object's.
Status Session::lost(Error error) {
    // An opening is counted as a whole, by open().
    if (error.code == Code::kTimeout && !opening_) WaitBudget::spent(waits_ms_);
    alive_.store(false, std::memory_order_release);
    return error;
}

Status Session::send_failed() {
    if (tls_ != nullptr && errno == EPROTO) return lost(tls_->error(peer_));
    if (errno == EAGAIN) return lost({Code::kTimeout, peer_ + " took no bytes in time"});
    return lost({Code::kUnavailable, "the connection to " + peer_ + " is lost: " + std::strerror(errno)});
}

Status Session::receive_failed(ssize_t n) {
    if (n == 0) return lost({Code::kUnavailable, peer_ + " closed the connection"});
    if (tls_ != nullptr && errno == EPROTO) return lost(tls_->error(peer_));
    if (errno == EAGAIN) return lost({Code::kTimeout, peer_ + " did not answer in time"});
    return lost({Code::kUnavailable, "the connection to " + peer_ + " is lost: " + std::strerror(errno)});
}

Status Session::misfit() {
    return lost({Code::kProtocol, peer_ + " sent an answer that does not fit the question"});
}

// Before a socket call, which then does not block.
Status Session::wait(short events) {
    Result<bool> ready = wait_for(fd_.get(), events, opening_->end, opening_->given_up);
    if (!ready) return lost(ready.error());
    if (!*ready) return lost({Code::kTimeout, peer_ + " did not answer in time"});
    return success();
}

bool Session::ready(short events) {
    pollfd waiting{fd_.get(), events, 0};
    int n = ::poll(&waiting, 1, waits_ms_);
    if (n == 0) errno = EAGAIN;
    return n > 0;
}

// Without sleeping at first when what comes is `near`.
ssize_t Session::receive_some(const iovec* parts, size_t n_parts, bool near) {
    if (tls_ != nullptr) {
        auto attempt = [&] { return tls_->receive(fd_.get(), parts, n_parts); };
        ssize_t n = near ? spin(attempt) : attempt();
        while (n < 0 && errno == EAGAIN && ready(POLLIN)) n = attempt();
        return n;
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = n_parts;
    if (near) {
        ssize_t n = spin([&] { return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT); });
        if (n >= 0 || errno != EAGAIN) return n;
    }
    return ::recvmsg(fd_.get(), &message, 0);
}

ssize_t Session::send_some(const iovec* parts, size_t n_parts, bool wait) {
    if (tls_ != nullptr) {
        ssize_t n = tls_->send(fd_.get(), parts, n_parts);
        while (n < 0 && errno == EAGAIN && wait && ready(POLLOUT)) n = tls_->send(fd_.get(), parts, n_parts);
        return n;
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = n_parts;
    return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
}

bool Session::tls_ready() {
    pollfd room{fd_.get(), POLLOUT, 0};
    return ::poll(&room, 1, 0) == 1 && tls_->flush(fd_.get());
}

Status Session::flush_tls() {
    if (tls_ == nullptr) return success();
    Signals signals(fd_.get());
    for (size_t before = tls_->unsent_bytes(); !tls_->flush(fd_.get());) {
        if (errno != EAGAIN) return send_failed();
        if (std::exchange(before, tls_->unsent_bytes()) > tls_->unsent_bytes()) signals.moved();
        if (opening_) {
            if (Status ready = wait(POLLOUT); !ready) return ready;
        } else if (!ready(POLLOUT) && !signals.again()) {
            return send_failed();
        }
    }
    return success();
}

Status Session::send_all(const std::byte* data, size_t size) {
    Signals signals(fd_.get());
    while (size != 0) {
        if (opening_) {
            if (Status ready = wait(POLLOUT); !ready) return ready;
        }
        iovec part{const_cast<std::byte*>(data), size};
        ssize_t n = send_some(&part, 1, !opening_);
        if (n < 0) {
            if (opening_ ? errno == EINTR || errno == EAGAIN : signals.again()) continue;
            return send_failed();
        }
        signals.moved();
        data += n;
        size -= static_cast<size_t>(n);
    }
    return flush_tls();
}

Status Session::receive(void* data, size_t size) {
    auto* at = static_cast<std::byte*>(data);
    Signals signals(fd_.get());
    while (size != 0) {
        iovec part{at, size};
        ssize_t n;
        if (opening_) {
            // Text that TLS has decrypted already would not wake the poll.
            bool here = tls_ != nullptr && tls_->pending();
            if (Status ready = here ? success() : wait(POLLIN); !ready) return ready;
            n = tls_ != nullptr ? tls_->receive(fd_.get(), at, size)
                                : ::recv(fd_.get(), at, size, MSG_DONTWAIT);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        } else {
            n = receive_some(&part, 1, near_);
        }
        if (n < 0 && signals.again()) continue;
        bool waits = n < 0 && errno == EAGAIN && peer_took_some();
        if (n <= 0 && !waits) return receive_failed(n);
        signals.moved();
        if (waits) continue;
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

// Whether bytes of a put have reached the peer since this was asked last: that is progress, too, while its
// answer cannot come.
bool Session::peer_took_some() {
    int error = errno;
    // 0 means that it is not looked at: a peer that takes no more is then the end of the wait.
    int before = std::exchange(unacknowledged_, 0);
    if (before != 0 && ::ioctl(fd_.get(), SIOCOUTQ, &unacknowledged_) != 0) unacknowledged_ = 0;
    errno = error;
    return unacknowledged_ < before;
}

// Of the handshake. Descriptors ride on the first byte of the frame: a plain recv would throw them away.
Status Session::receive_with_fds(void* data, size_t size, std::vector<Fd>& fds) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        if (Status ready = wait(POLLIN); !ready) return ready;
        iovec part{at, size};
        alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        ssize_t n = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return lost({Code::kUnavailable, peer_ + " closed the connection during the handshake"});
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; ++i) {
                int fd;
                std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
                fds.emplace_back(fd);
            }
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

Status Session::receive_frame(FrameHeader& header, std::vector<Fd>* fds) {
    if (fds == nullptr) {
        if (Status status = receive_header(header); !status) return status;
    } else {
        if (Status status = receive_with_fds(&header, sizeof(header), *fds); !status) return status;
        if (Status status = check_header(header); !status) return status;
    }
    constexpr uint32_t kAnswerMax = 64u << 20;
    // Before memory is reserved for it.
    if (header.length > kAnswerMax) return lost({Code::kProtocol, peer_ + " sent a frame over the limit"});
    body_.resize(header.length);
    return receive(body_.data(), body_.size());
}

Status Session::receive_header(FrameHeader& header) {
    if (Status status = receive(&header, sizeof(header)); !status) return status;
    return check_header(header);
}

Status Session::check_header(const FrameHeader& header) {
    if (header.magic == kMagic && header.version == kVersion) return success();
    if (header.magic != kMagic) {
        return lost({Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool node"});
    }
    return lost(other_version(header, {"this process", kWireVersions}, peer_));
}

Status Session::call(Kind kind, const Build& build, const Parse& parse, int timeout_ms) {
    if (fork_.in_child()) return forked();
    Status status = success();
    {
        IoLock lock(*this);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
        Turn turn(*this, timeout_ms);
        if (!turn.any()) return no_time_left(peer_);
        status = exchange(kind, build, parse);
    }
    flush_posted();
    return status;
}

Status Session::exchange(Kind kind, const Build& build, const Parse& parse) {
    uint64_t request_id = 0;
    if (Status status = ask(kind, build, request_id); !status) return status;
    return answer(kind, request_id, parse);
}

Status Session::ask(Kind kind, const Build& build, uint64_t& request_id) {
    out_.clear();
    std::swap(out_, unsent_);
    take_posted(out_);
    request_id = next_request_++;
    size_t at = begin_frame(out_, kind, 0, request_id);
    Writer w(out_);
    build(w);
    finish_frame(out_, at);
    return send_all(out_.data(), out_.size());
}

Status Session::answer(Kind kind, uint64_t request_id, const Parse& parse) {
    FrameHeader header;
    if (Status status = receive_frame(header, nullptr); !status) return status;
    Reader body(body_);
    if (header.kind == Kind::kError) {
        Error error = read_error(body);
        return header.request_id == request_id ? Status(std::move(error)) : lost(std::move(error));
    }
    // Answers come in the order of the questions, one at a time: another id means that the two sides
    // disagree about what was asked.
    if (header.request_id != request_id || header.kind != kind || !parse(body)) return misfit();
    return success();
}

// The body of an ERROR whose header has come.
Status Session::refused(const FrameHeader& header, uint64_t request_id) {
    if (header.length > (64u << 10)) return misfit();
    body_.resize(header.length);
    if (Status status = receive(body_.data(), body_.size()); !status) return status;
    Reader body(body_);
    Error error = read_error(body);
    return header.request_id == request_id ? Status(std::move(error)) : lost(std::move(error));
}

void Session::take_posted(std::vector<std::byte>& out) {
    MutexLock lock(posted_mutex_);
    out.insert(out.end(), posted_.begin(), posted_.end());
    posted_.clear();
    // Reads straight from the arena: the node learns of them in one frame, for its eviction and its
    // metrics.
    if (read_count_ == 0) return;
    size_t at = begin_frame(out, Kind::kTouch, kFlagOneWay, 0);
    Writer w(out);
    w.number(read_count_);
    w.number(read_bytes_);
    w.number(static_cast<uint32_t>(read_slots_.size()));
    w.bytes(read_slots_.data(), read_slots_.size() * sizeof(uint32_t));
    finish_frame(out, at);
    read_slots_.clear();
    read_count_ = read_bytes_ = 0;
}

void Session::post(Kind kind, const Build& build) {
    if (fork_.in_child() || !alive()) return;
    {
        MutexLock lock(posted_mutex_);
        size_t at = begin_frame(posted_, kind, kFlagOneWay, 0);
        Writer w(posted_);
        build(w);
        finish_frame(posted_, at);
    }
    flush_posted();
}

// A thread calls this once it has let go of io_mutex_, so what was posted meanwhile is never left behind.
void Session::flush_posted() {
    for (;;) {
        {
            MutexLock lock(posted_mutex_);
            if (posted_.empty() && read_slots_.size() < kReadSlotsMax) return;
        }
        if (!io_mutex_.try_lock()) return;
        MutexLock lock(io_mutex_, std::adopt_lock);
        if (!alive() || !drain(false)) return;
    }
}

// Sends what waits; io_mutex_ is held. Without `wait` a node that takes nothing now is let be, but a frame is
// never left half sent: the node would wait for the rest, and then hang up. True when nothing is left.
bool Session::drain(bool wait) {
    if (unsent_.empty()) take_posted(unsent_);
    if (unsent_.empty()) return true;
    size_t sent = 0;
    if (!wait) {
        // TLS takes all at once, and what the socket had no room for would be waited for.
        if (tls_ != nullptr && !tls_ready()) return false;
        iovec part{unsent_.data(), unsent_.size()};
        ssize_t n = send_some(&part, 1, false);
        if (n <= 0) return false;
        sent = static_cast<size_t>(n);
    }
    if (!send_all(unsent_.data() + sent, unsent_.size() - sent)) return false;
    unsent_.clear();
    return true;
}

Status Session::send(Kind kind, const Build& build) {
    if (fork_.in_child()) return forked();
    MutexLock lock(io_mutex_);
    if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
    take_posted(unsent_);
    size_t at = begin_frame(unsent_, kind, kFlagOneWay, 0);
    Writer w(unsent_);
    build(w);
    finish_frame(unsent_, at);
    if (drain(true)) return success();
    return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
}

Status Session::read(size_t n, const Build& build, const Target& target, std::vector<ReadRow>& rows,
                     std::vector<uint32_t>& crcs) {
    if (fork_.in_child()) return forked();
    Status status = success();
    {
        IoLock lock(*this);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
        Turn turn(*this, 0);
        if (!turn.any()) return no_time_left(peer_);
        uint64_t request_id = 0;
        if (Status sent = ask(Kind::kRead, build, request_id); !sent) return sent;
        FrameHeader header;
        if (Status got = receive_header(header); !got) return got;
        if (header.kind == Kind::kError) return refused(header, request_id);
        uint32_t count = 0;
        uint64_t head = sizeof(count) + n * sizeof(ReadRow);
        if (header.kind != Kind::kRead || header.request_id != request_id || header.length < head) {
            return misfit();
        }
        if (Status got = receive(&count, sizeof(count)); !got) return got;
        if (count != n) return misfit();
        rows.resize(n);
        if (Status got = receive(rows.data(), n * sizeof(ReadRow)); !got) return got;
        // All rows are checked before a byte is received: what the node claims must fit the caller's
        // memory, and add up to the frame.
        uint64_t follow = header.length - head;
        for (size_t i = 0; i < n; ++i) {
            if (rows[i].bytes == 0) continue;
            uint64_t room = 0;
            for (const MemoryRef& part : target(i)) room += part.bytes;
            if (rows[i].bytes > room || rows[i].bytes > follow) return misfit();
            follow -= rows[i].bytes;
        }
        if (follow != 0) return misfit();
        status = receive_bytes(rows, target, crcs);
    }
    flush_posted();
    return status;
}

// Several rows in one system call, a piece at a time, so that the copier of the destination finds the bytes
// that it sums in the cache.
Status Session::receive_bytes(const std::vector<ReadRow>& rows, const Target& target,
                              std::vector<uint32_t>& crcs) {
    constexpr uint64_t kPieceBytes = 256u << 10;
    constexpr size_t kParts = 64;
    struct Piece {
        MemoryRef to;  // what has not come yet
        size_t row;
    };
    crcs.resize(rows.size(), 0);
    uint64_t all = 0;
    std::vector<Piece> pieces;
    for (size_t i = 0; i < rows.size(); ++i) {
        uint64_t left = rows[i].bytes;
        if (left == 0) continue;
        all += left;
        for (const MemoryRef& part : target(i)) {
            uint64_t size = std::min(left, part.bytes);
            if (size != 0) pieces.push_back({part.sub(0, size), i});
            left -= size;
        }
    }
    // Beyond it the bytes arrive more slowly than a sleeping thread is woken.
    const bool near = all <= kSpinBytesMax;
    Signals signals(fd_.get());
    iovec parts[kParts];
    for (size_t at = 0; at < pieces.size();) {
        size_t n = 0;
        uint64_t bytes = 0;
        for (; at + n < pieces.size() && n < kParts && bytes < kPieceBytes; ++n) {
            const MemoryRef& to = pieces[at + n].to;
            parts[n] = iovec{to.data(), std::min(to.bytes, kPieceBytes - bytes)};
            bytes += parts[n].iov_len;
        }
        ssize_t got = receive_some(parts, n, near);
        if (got < 0 && signals.again()) continue;
        if (got <= 0) return receive_failed(got);
        signals.moved();
        for (auto left = static_cast<uint64_t>(got); left != 0;) {
            Piece& piece = pieces[at];
            uint64_t step = std::min(left, piece.to.bytes);
            // What follows on the connection is the rest of the answer: it ends with this reader.
            Status summed = sum(piece.to.sub(0, step), crcs[piece.row]);
            if (!summed) return lost(summed.error());
            piece.to = piece.to.sub(step, piece.to.bytes - step);
            left -= step;
            if (piece.to.bytes == 0) ++at;
        }
    }
    return success();
}

Status Session::put(const Build& build, std::span<const MemoryRef> parts, const Parse& parse,
                    int timeout_ms) {
    if (fork_.in_child()) return forked();
    uint64_t bytes = 0;
    for (const MemoryRef& part : parts) bytes += part.bytes;
    Status status = success();
    {
        IoLock lock(*this);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
        Turn turn(*this, timeout_ms);
        if (!turn.any()) return no_time_left(peer_);
        out_.clear();
        std::swap(out_, unsent_);
        take_posted(out_);
        uint64_t request_id = parse ? next_request_++ : 0;
        size_t at = begin_frame(out_, Kind::kPut, parse ? 0 : kFlagOneWay, request_id);
        Writer w(out_);
        build(w);
        // The frame's length counts the bytes that follow out_, which are sent from where they lie.
        auto length = static_cast<uint32_t>(out_.size() - at - sizeof(FrameHeader) + bytes);
        std::memcpy(out_.data() + at + offsetof(FrameHeader, length), &length, sizeof(length));
        status = send_parts(parts);
        if (bytes > kSpinBytesMax) {  // the node is still taking them in
            near_ = false;
            (void)::ioctl(fd_.get(), SIOCOUTQ, &unacknowledged_);
        }
        // An answer may be late while the bytes are on their way: peer_took_some() tells a slow network
        // from a dead node.
        if (status && parse) status = answer(Kind::kPut, request_id, parse);
        near_ = true;
        unacknowledged_ = 0;
    }
    flush_posted();
    return status;
}

// What stands in out_, and the parts behind it.
Status Session::send_parts(std::span<const MemoryRef> parts) {
    constexpr size_t kParts = 64;
    Signals signals(fd_.get());
    iovec iov[kParts];
    size_t head = 0, next = 0;
    uint64_t done = 0;  // of parts[next]
    while (head < out_.size() || next < parts.size()) {
        size_t n = 0;
        if (head < out_.size()) iov[n++] = iovec{out_.data() + head, out_.size() - head};
        uint64_t skip = done;
        for (size_t i = next; i < parts.size() && n < kParts; ++i, skip = 0) {
            if (parts[i].bytes != skip) iov[n++] = iovec{parts[i].data() + skip, parts[i].bytes - skip};
        }
        if (n == 0) break;
        ssize_t sent = send_some(iov, n, true);
        if (sent < 0) {
            if (signals.again()) continue;
            return send_failed();
        }
        signals.moved();
        auto left = static_cast<uint64_t>(sent);
        uint64_t step = std::min<uint64_t>(left, out_.size() - head);
        head += step;
        left -= step;
        while (next < parts.size()) {
            step = std::min(left, parts[next].bytes - done);
            done += step;
            left -= step;
            if (done != parts[next].bytes) break;
            ++next;
            done = 0;
        }
    }
    return flush_tls();
}

bool Session::behind() {
    MutexLock lock(posted_mutex_);
    return posted_.size() > kPostedMax;
}

void Session::note_read(uint32_t slot, uint64_t bytes) {
    if (fork_.in_child()) return;
    size_t waiting;
    {
        MutexLock lock(posted_mutex_);
        // When the node takes nothing, which objects were read is forgotten; how many is not.
        if (read_slots_.size() < 4 * kReadSlotsMax) read_slots_.push_back(slot);
        ++read_count_;
        read_bytes_ += bytes;
        waiting = read_slots_.size();
    }
    if (waiting >= kReadSlotsMax) flush_posted();
}

void Session::flush_reads() {
    MutexLock lock(io_mutex_);
    if (alive()) drain(true);
}

}  // namespace moonpool
