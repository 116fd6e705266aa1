#include "store/session.hpp"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/crc32c.hpp"
#include "base/hmac.hpp"
#include "wire/address.hpp"
#include "wire/congestion.hpp"
#include "wire/dial.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kObjectAlign = 64;     // a cache line: neighbours do not share one
constexpr size_t kReadSlotsMax = 256;     // reads told to the node in one frame
constexpr size_t kPostedMax = 1u << 20;   // bytes of one-way frames, then puts wait for the node again
constexpr uint64_t kLeaseAheadSlabs = 4;  // a batch leases at most this many slabs in one piece

// How long a caller polls for its answer before it sleeps. A sleeping thread in a virtual machine is woken in
// 20-50 us, several times what the node needs to answer.
constexpr std::chrono::microseconds kSpin{50};

// Beyond it the bytes of a frame take longer than being woken does, and the kernel gathers the next ones
// meanwhile: who polls for them burns a core that the other side, or an engine, could have.
constexpr uint64_t kSpinBytesMax = 128u << 10;

// Receives, without sleeping at first when what comes is `near`; the result of recvmsg.
ssize_t receive_some(int fd, iovec* parts, size_t n_parts, bool near) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = n_parts;
    static const bool alone = std::thread::hardware_concurrency() < 2;
    if (near && !alone) {
        auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            ssize_t n = ::recvmsg(fd, &message, MSG_DONTWAIT);
            if (n >= 0 || errno != EAGAIN) return n;
            ::sched_yield();  // the node may wait for this very core
        } while (std::chrono::steady_clock::now() < end);
    }
    return ::recvmsg(fd, &message, 0);
}

Result<Fd> connect_to(const ClientOptions& options, const std::atomic<bool>* given_up) {
    if (options.dial) return options.dial();
    const std::string& path = options.socket_path;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        return Error{Code::kInvalidArgument,
                     "the socket path " + path + " is longer than a Unix socket allows"};
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    // A node that accepts nobody has a full queue at last; then connect() waits, a piece at a time.
    Deadline end = deadline_in(options.timeout_ms);
    set_socket_timeouts(fd.get(), std::clamp(options.timeout_ms, 1, kLookMs));
    for (;;) {
        if (given_up != nullptr && given_up->load()) return Error{Code::kClosed, "given up meanwhile"};
        if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
        if (errno != EINTR && errno != EAGAIN) {
            return Error{Code::kUnavailable, "no node serves " + path + " (" + std::strerror(errno) +
                                                 "); start one with: moonpool node"};
        }
        if (std::chrono::steady_clock::now() >= end) {
            return Error{Code::kTimeout, "the node at " + path + " took no connection in time"};
        }
    }
}

Error forked() {
    return Error{Code::kForked, "this handle belongs to the parent process; open a new one after fork"};
}

}  // namespace

Slab::~Slab() {
    if (!session.alive()) return;
    (void)session.arena_.protect(extent.offset, extent.size, false);
    session.post(Kind::kReturn, [this](Writer& w) { w.number(extent.offset); });
}

Result<std::shared_ptr<Session>> Session::open(const ClientOptions& options,
                                               const std::atomic<bool>* given_up) {
    std::shared_ptr<Session> session(new Session());
    session->timeout_ms_ = options.timeout_ms;
    if (options.address.empty()) {
        Result<Fd> fd = connect_to(options, given_up);
        if (!fd) return fd.error();
        session->fd_ = std::move(*fd);
        session->peer_ = options.dial ? "the embedded node" : options.socket_path;
        set_socket_timeouts(session->fd_.get(), options.timeout_ms);
        session->opening_ = Opening{deadline_in(options.timeout_ms), given_up};
        if (Status status = session->handshake(options); !status) return status.error();
    } else {
        DialOptions to{options.address,    options.token,
                       options.tenant,     std::string(kPurposeStore),
                       options.timeout_ms, ""};
        to.given_up = given_up;
        Result<Dialed> dialed = moonpool::dial(to);
        if (!dialed) return dialed.error();
        session->fd_ = std::move(dialed->fd);
        leave_bbr_when_near(session->fd_.get());
        session->peer_ = options.address;
        session->incarnation_ = dialed->incarnation;
        Reader welcome(dialed->welcome);
        uint64_t arena_bytes = 0, index_bytes = 0;
        if (!session->read_welcome(welcome, arena_bytes, index_bytes)) {
            return Error{Code::kProtocol,
                         options.address + " does not speak the protocol of a Moonpool node"};
        }
    }
    session->opening_ = Opening{deadline_in(options.timeout_ms), given_up};
    if (Status status = session->open_space(options); !status) return status.error();
    session->opening_.reset();
    return session;
}

Session::~Session() {
    bool was_alive = alive_.exchange(false);
    if (fd_.valid()) {  // else we are in a child of fork()
        if (was_alive) {
            std::lock_guard lock(io_mutex_);
            drain(true);
        }
        ::shutdown(fd_.get(), SHUT_RDWR);
    }
    slab_.reset();
}

bool Session::check_alive() {
    if (!alive()) return false;
    char byte;
    ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) alive_.store(false);
    return alive();
}

void Session::retire() {
    flush_reads();
    std::lock_guard lock(slab_mutex_);
    slab_.reset();
}

Status Session::handshake(const ClientOptions& options) {
    FrameHeader header;
    if (Status status = receive_frame(header, nullptr); !status) return status;
    Reader challenge(body_);
    if (header.kind == Kind::kError) return read_error(challenge);
    Nonce node_nonce;
    std::string_view nonce = challenge.bytes(node_nonce.size());
    std::string_view incarnation = challenge.bytes(incarnation_.size());
    if (header.kind != Kind::kChallenge || !challenge.done()) {
        return Error{Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool node"};
    }
    std::memcpy(node_nonce.data(), nonce.data(), nonce.size());
    std::memcpy(incarnation_.data(), incarnation.data(), incarnation.size());

    Nonce client_nonce = random_nonce();
    Mac mac =
        handshake_mac(Role::kClient, options.token, node_nonce, client_nonce, incarnation_, options.tenant);
    out_.clear();
    size_t at = begin_frame(out_, Kind::kAuth, 0, next_request_);
    Writer w(out_);
    w.text16(options.tenant);
    w.bytes(client_nonce.data(), client_nonce.size());
    w.bytes(mac.data(), mac.size());
    finish_frame(out_, at);
    if (Status status = send_all(out_.data(), out_.size()); !status) return status;

    std::vector<Fd> fds;
    if (Status status = receive_frame(header, &fds); !status) return status;
    Reader welcome(body_);
    if (header.kind == Kind::kError) return read_error(welcome);
    std::string_view proof = welcome.bytes(sizeof(Mac));
    uint64_t arena_bytes = 0, index_bytes = 0;
    if (header.kind != Kind::kWelcome || !read_welcome(welcome, arena_bytes, index_bytes) ||
        fds.size() != 2) {
        return Error{Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool node"};
    }
    Mac expected =
        handshake_mac(Role::kNode, options.token, node_nonce, client_nonce, incarnation_, options.tenant);
    if (!equal_constant_time(expected,
                             std::span(reinterpret_cast<const uint8_t*>(proof.data()), proof.size()))) {
        return Error{Code::kAuth,
                     peer_ + " does not know the cluster token: it is not the node that it claims to be"};
    }
    Result<Mapping> arena = Mapping::map(fds[0].get(), arena_bytes, true);
    if (!arena) return arena.error();
    // Mapped writable first, for the right to make single slabs writable again; read-only from here on.
    if (Status status = arena->protect(0, arena_bytes, false); !status) return status;
    arena_ = std::move(*arena);
    Result<IndexReader> index = IndexReader::open(fds[1].get(), index_bytes, incarnation_);
    if (!index) return index.error();
    index_ = std::move(*index);
    return success();
}

bool Session::read_welcome(Reader& welcome, uint64_t& arena_bytes, uint64_t& index_bytes) {
    arena_bytes = arena_bytes_ = welcome.number<uint64_t>();
    index_bytes = welcome.number<uint64_t>();
    slab_bytes_ = welcome.number<uint64_t>();
    object_bytes_max_ = welcome.number<uint64_t>();
    key_bytes_max_ = welcome.number<uint32_t>();
    parts_max_ = welcome.number<uint32_t>();
    frame_bytes_max_ = welcome.number<uint32_t>();
    frame_keys_max_ = welcome.number<uint32_t>();
    if (!welcome.ok()) return false;
    if (welcome.left() == 0) return true;  // a node of the release before
    node_name_ = std::string(welcome.text16());
    host_id_ = std::string(welcome.text16());
    address_ = std::string(welcome.text16());
    master_ = std::string(welcome.text16());
    if (welcome.left() != 0) features_ = welcome.number<uint32_t>();
    return welcome.ok();
}

Status Session::open_space(const ClientOptions& options) {
    return call(
        Kind::kOpenSpace,
        [&](Writer& w) {
            w.text16(options.name_space);
            w.text16(options.fingerprint);
        },
        [&](Reader& r) {
            space_ = r.number<uint32_t>();
            return r.done();
        });
}

// The socket stays open until the last view is gone: a node that was merely late keeps our pins that long, so
// nobody reads memory that has become another object's.
Status Session::lost(Error error) {
    alive_.store(false, std::memory_order_release);
    return error;
}

Status Session::send_failed() {
    if (errno == EAGAIN) return lost({Code::kTimeout, peer_ + " took no bytes in time"});
    return lost({Code::kUnavailable, "the connection to " + peer_ + " is lost: " + std::strerror(errno)});
}

Status Session::receive_failed(ssize_t n) {
    if (n == 0) return lost({Code::kUnavailable, peer_ + " closed the connection"});
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

Status Session::send_all(const std::byte* data, size_t size) {
    while (size != 0) {
        if (opening_) {
            if (Status ready = wait(POLLOUT); !ready) return ready;
        }
        ssize_t n = ::send(fd_.get(), data, size, MSG_NOSIGNAL | (opening_ ? MSG_DONTWAIT : 0));
        if (n < 0) {
            if (errno == EINTR || (opening_ && errno == EAGAIN)) continue;
            return send_failed();
        }
        data += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

Status Session::receive(void* data, size_t size) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        iovec part{at, size};
        ssize_t n;
        if (opening_) {
            if (Status ready = wait(POLLIN); !ready) return ready;
            n = ::recv(fd_.get(), at, size, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) continue;
        } else {
            n = receive_some(fd_.get(), &part, 1, near_);
        }
        if (n < 0 && (errno == EINTR || (errno == EAGAIN && peer_took_some()))) continue;
        if (n <= 0) return receive_failed(n);
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

// Whether bytes of a put have reached the peer since this was asked last: that is progress, too, while its
// answer cannot come.
bool Session::peer_took_some() {
    int error = errno;
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
    return lost({Code::kProtocol,
                 peer_ + " does not speak version " + std::to_string(kVersion) + " of the wire format"});
}

Status Session::call(Kind kind, const Build& build, const Parse& parse, int timeout_ms) {
    if (fork_.in_child()) return forked();
    Status status = success();
    {
        std::lock_guard lock(io_mutex_);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
        bool own_timeout = timeout_ms > 0 && timeout_ms != timeout_ms_;
        if (own_timeout) set_socket_timeouts(fd_.get(), timeout_ms);
        status = exchange(kind, build, parse);
        if (own_timeout) set_socket_timeouts(fd_.get(), timeout_ms_);
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
    std::lock_guard lock(posted_mutex_);
    out.insert(out.end(), posted_.begin(), posted_.end());
    posted_.clear();
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
        std::lock_guard lock(posted_mutex_);
        size_t at = begin_frame(posted_, kind, kFlagOneWay, 0);
        Writer w(posted_);
        build(w);
        finish_frame(posted_, at);
    }
    flush_posted();
}

// Whoever holds io_mutex_ calls this once it has let go, so what was posted meanwhile is never left behind.
void Session::flush_posted() {
    for (;;) {
        {
            std::lock_guard lock(posted_mutex_);
            if (posted_.empty() && read_slots_.size() < kReadSlotsMax) return;
        }
        std::unique_lock lock(io_mutex_, std::try_to_lock);
        if (!lock.owns_lock() || !alive()) return;
        if (!drain(false)) return;
    }
}

// Sends what waits; io_mutex_ is held. Without `wait` a node that takes nothing now is let be, but a frame is
// never left half sent: the node would wait for the rest, and then hang up. True when nothing is left.
bool Session::drain(bool wait) {
    if (unsent_.empty()) take_posted(unsent_);
    if (unsent_.empty()) return true;
    size_t sent = 0;
    if (!wait) {
        ssize_t n = ::send(fd_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0) return false;
        sent = static_cast<size_t>(n);
    }
    if (sent < unsent_.size() && !send_all(unsent_.data() + sent, unsent_.size() - sent)) return false;
    unsent_.clear();
    return true;
}

Status Session::send(Kind kind, const Build& build) {
    if (fork_.in_child()) return forked();
    std::lock_guard lock(io_mutex_);
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
        std::lock_guard lock(io_mutex_);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
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
        uint64_t follow = header.length - head;
        for (size_t i = 0; i < n; ++i) {
            if (rows[i].bytes == 0) continue;
            uint64_t room = 0;
            for (const Part& part : target(i)) room += part.size;
            if (rows[i].bytes > room || rows[i].bytes > follow) return misfit();
            follow -= rows[i].bytes;
        }
        if (follow != 0) return misfit();
        status = receive_bytes(rows, target, crcs);
    }
    flush_posted();
    return status;
}

// Several rows in one system call, a piece at a time, so that the checksum finds its bytes in the cache.
Status Session::receive_bytes(const std::vector<ReadRow>& rows, const Target& target,
                              std::vector<uint32_t>& crcs) {
    constexpr uint64_t kPieceBytes = 256u << 10;
    constexpr size_t kParts = 64;
    struct Piece {
        std::byte* data;
        uint64_t size;
        size_t row;
    };
    crcs.assign(rows.size(), 0);
    uint64_t all = 0;
    std::vector<Piece> pieces;
    for (size_t i = 0; i < rows.size(); ++i) {
        uint64_t left = rows[i].bytes;
        if (left == 0) continue;
        all += left;
        for (const Part& part : target(i)) {
            uint64_t size = std::min(left, part.size);
            if (size != 0) pieces.push_back({part.data, size, i});
            left -= size;
        }
    }
    const bool near = all <= kSpinBytesMax;
    iovec parts[kParts];
    for (size_t at = 0; at < pieces.size();) {
        size_t n = 0;
        uint64_t bytes = 0;
        for (; at + n < pieces.size() && n < kParts && bytes < kPieceBytes; ++n) {
            parts[n] = iovec{pieces[at + n].data, std::min(pieces[at + n].size, kPieceBytes - bytes)};
            bytes += parts[n].iov_len;
        }
        ssize_t got = receive_some(fd_.get(), parts, n, near);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return receive_failed(got);
        for (auto left = static_cast<uint64_t>(got); left != 0;) {
            Piece& piece = pieces[at];
            uint64_t step = std::min(left, piece.size);
            crcs[piece.row] = crc32c(crcs[piece.row], piece.data, step);
            piece.data += step;
            piece.size -= step;
            left -= step;
            if (piece.size == 0) ++at;
        }
    }
    return success();
}

Status Session::put(const Build& build, std::span<const Part> parts, const Parse& parse, int timeout_ms) {
    if (fork_.in_child()) return forked();
    uint64_t bytes = 0;
    for (const Part& part : parts) bytes += part.size;
    Status status = success();
    {
        std::lock_guard lock(io_mutex_);
        if (!alive()) return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost"};
        bool own_timeout = timeout_ms > 0 && timeout_ms != timeout_ms_;
        if (own_timeout) set_socket_timeouts(fd_.get(), timeout_ms);
        out_.clear();
        std::swap(out_, unsent_);
        take_posted(out_);
        uint64_t request_id = parse ? next_request_++ : 0;
        size_t at = begin_frame(out_, Kind::kPut, parse ? 0 : kFlagOneWay, request_id);
        Writer w(out_);
        build(w);
        auto length = static_cast<uint32_t>(out_.size() - at - sizeof(FrameHeader) + bytes);
        std::memcpy(out_.data() + at + offsetof(FrameHeader, length), &length, sizeof(length));
        status = send_parts(parts);
        if (bytes > kSpinBytesMax) {  // the node is still taking them in
            near_ = false;
            (void)::ioctl(fd_.get(), SIOCOUTQ, &unacknowledged_);
        }
        if (status && parse) status = answer(Kind::kPut, request_id, parse);
        near_ = true;
        unacknowledged_ = 0;
        if (own_timeout) set_socket_timeouts(fd_.get(), timeout_ms_);
    }
    flush_posted();
    return status;
}

// What stands in out_, and the parts behind it.
Status Session::send_parts(std::span<const Part> parts) {
    constexpr size_t kParts = 64;
    iovec iov[kParts];
    size_t head = 0, next = 0;
    uint64_t done = 0;  // of parts[next]
    while (head < out_.size() || next < parts.size()) {
        size_t n = 0;
        if (head < out_.size()) iov[n++] = iovec{out_.data() + head, out_.size() - head};
        uint64_t skip = done;
        for (size_t i = next; i < parts.size() && n < kParts; ++i, skip = 0) {
            if (parts[i].size != skip) iov[n++] = iovec{parts[i].data + skip, parts[i].size - skip};
        }
        if (n == 0) break;
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = n;
        ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return send_failed();
        }
        auto left = static_cast<uint64_t>(sent);
        uint64_t step = std::min<uint64_t>(left, out_.size() - head);
        head += step;
        left -= step;
        while (next < parts.size()) {
            step = std::min(left, parts[next].size - done);
            done += step;
            left -= step;
            if (done != parts[next].size) break;
            ++next;
            done = 0;
        }
    }
    return success();
}

bool Session::behind() {
    std::lock_guard lock(posted_mutex_);
    return posted_.size() > kPostedMax;
}

void Session::note_read(uint32_t slot, uint64_t bytes) {
    if (fork_.in_child()) return;
    size_t waiting;
    {
        std::lock_guard lock(posted_mutex_);
        if (read_slots_.size() < 4 * kReadSlotsMax) read_slots_.push_back(slot);
        ++read_count_;
        read_bytes_ += bytes;
        waiting = read_slots_.size();
    }
    if (waiting >= kReadSlotsMax) flush_posted();
}

void Session::flush_reads() {
    std::lock_guard lock(io_mutex_);
    if (alive()) drain(true);
}

Result<std::shared_ptr<Slab>> Session::lease(uint64_t min, uint64_t want, std::string& why, int timeout_ms) {
    Extent extent;
    Status status = call(
        Kind::kLease,
        [&](Writer& w) {
            w.number(min);
            w.number(want);
        },
        [&](Reader& r) {
            extent.offset = r.number<uint64_t>();
            extent.size = r.number<uint64_t>();
            why = std::string(r.text16());
            return r.done() && extent.size <= arena_.size() && extent.offset <= arena_.size() - extent.size;
        },
        timeout_ms);
    if (!status) return status.error();
    if (extent.size == 0) return std::shared_ptr<Slab>();
    auto slab = std::make_shared<Slab>(*this, extent);
    if (Status writable = make_writable(extent); !writable) return writable.error();
    return slab;
}

Status Session::make_writable(Extent extent) {
    if (Status status = arena_.protect(extent.offset, extent.size, true); !status) return status;
    bool fresh = false;
    {
        std::lock_guard lock(populated_mutex_);
        populated_.resize(arena_.size() / kHugePageBytes + 1);
        for (uint64_t page = extent.offset / kHugePageBytes; page <= (extent.end() - 1) / kHugePageBytes;
             ++page) {
            fresh |= !populated_[page];
            populated_[page] = true;
        }
    }
    if (fresh) arena_.populate_for_write(extent.offset, extent.size);
    return success();
}

uint64_t Session::room_bytes(uint64_t size) {
    return (size + kObjectAlign - 1) / kObjectAlign * kObjectAlign;
}

Result<Room> Session::reserve(uint64_t size, uint64_t ahead, std::shared_ptr<Slab>& own, std::string& why,
                              int timeout_ms) {
    if (size == 0) return Room{};
    if (size > object_bytes_max_) {
        why = "an object of " + std::to_string(size) + " bytes is over the limit of " +
              std::to_string(object_bytes_max_) + " bytes (node.object_share_max of the arena)";
        return Room{};
    }
    uint64_t need = room_bytes(size);
    if (own == nullptr || own->cursor + need > own->extent.size) {
        own.reset();  // goes back once it is committed, so that what is in it may make room
        if (need + ahead < slab_bytes_) return reserve_shared(size, ahead, why, timeout_ms);
        uint64_t want = std::max(need, std::min(need + ahead, slab_bytes_ * kLeaseAheadSlabs));
        Result<std::shared_ptr<Slab>> slab = lease(need, want, why, timeout_ms);
        if (!slab) return slab.error();
        if (*slab == nullptr) return Room{};
        own = std::move(*slab);
    }
    Room room{own, Extent{own->extent.offset + own->cursor, size}};
    own->cursor += need;
    return room;
}

// For what is less than a slab: all threads fill one.
Result<Room> Session::reserve_shared(uint64_t size, uint64_t ahead, std::string& why, int timeout_ms) {
    uint64_t need = room_bytes(size);
    std::lock_guard lock(slab_mutex_);
    if (slab_ == nullptr || slab_->cursor + need > slab_->extent.size) {
        // A large object gets a lease of its own; the slab for small ones stays as it is.
        bool own = need > slab_bytes_ / 2 && ahead == 0;
        if (!own) slab_.reset();  // goes back once its last writer has committed
        Result<std::shared_ptr<Slab>> slab = lease(need, own ? need : slab_bytes_, why, timeout_ms);
        if (!slab) return slab.error();
        if (*slab == nullptr) return Room{};
        if (own) {
            (*slab)->cursor = need;
            return Room{*slab, Extent{(*slab)->extent.offset, size}};
        }
        slab_ = std::move(*slab);
    }
    Room room{slab_, Extent{slab_->extent.offset + slab_->cursor, size}};
    slab_->cursor += need;
    return room;
}

void Session::unreserve(Room& room) {
    if (room.slab == nullptr) return;
    std::lock_guard lock(slab_mutex_);
    uint64_t need = room_bytes(room.extent.size);
    if (room.slab->extent.offset + room.slab->cursor == room.extent.offset + need) room.slab->cursor -= need;
    room.slab.reset();
}

}  // namespace moonpool
