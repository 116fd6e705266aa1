// Handshake, reading and writing, deadlines and the end. The requests themselves are answered in
// connection_requests.cpp, those that carry bytes in connection_tcp.cpp, those that wait for a disk in
// connection_ssd.cpp. All of it runs on the node's loop.
//
// States, each with the field that tells it:
//   unproved       pool_ == nullptr   only AUTH is understood; a remote connection never is in this state
//   serving        pool_ != nullptr   frames are parsed while the backlog of answers is below its limit
//   receiving      put_ != nullptr    bytes of a PUT go straight to the arena; no frame is parsed meanwhile
//   parked         parked_ != nullptr a frame waits for a disk; nothing is read, but an end is noticed
//   ended          ended_             the last words are said; only the client's end is waited for
#include "store/node/connection.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/hmac.hpp"
#include "directory/range_handshake.hpp"
#include "wire/congestion.hpp"
#include "wire/dial.hpp"

namespace moonpool {

Connection::Connection(Server& server, Fd fd, uint64_t now_ms)
    : server_(server),
      fd_(std::move(fd)),
      nonce_(random_nonce()),
      since_ms_(now_ms),
      progress_ms_(now_ms),
      pace_(server.options_.limits, now_ms) {}

Connection::Connection(Server& server, Fd fd, std::unique_ptr<TlsStream> tls, uint64_t now_ms, Pool& pool,
                       const Access& access)
    : server_(server),
      fd_(std::move(fd)),
      tls_(std::move(tls)),
      pool_(&pool),
      access_(access),
      nonce_(),
      since_ms_(now_ms),
      progress_ms_(now_ms),
      pace_(server.options_.limits, now_ms),
      remote_(true) {
    leave_bbr_when_near(fd_.get());
}

Connection::~Connection() {
    // The promotions that were asked for may still call back; from here on they find no connection.
    unpark();
    // Everything that the client held is given back here, however the connection ended. A PUT goes before the
    // leases, since close_put() looks its own up among them.
    for (const OutPiece& piece : queue_.pieces()) pool_->table().unpin(piece.slot, piece.generation);
    if (put_ != nullptr) close_put();
    for (auto& [id, pinned] : pins_) release(pinned);
    for (auto& [offset, extent] : leases_) pool_->leases().close(offset);
    for (uint32_t space : spaces_) pool_->leave_space(space);
}

bool Connection::greet() {
    size_t at = begin_handshake_frame(out_, Kind::kChallenge, 0, server_.options_.versions);
    Writer w(out_);
    w.bytes(nonce_.data(), nonce_.size());
    w.bytes(server_.incarnation_.data(), server_.incarnation_.size());
    finish_frame(out_, at);
    return flush();
}

bool Connection::on_readable(uint64_t now_ms) {
    if (ended_) return discard();
    // Only the hang-up is of interest: bytes stay in the socket until the parked frame has been answered.
    if (parked_ != nullptr) return !hung_up();
    constexpr int kRoundsMax = 8;  // then it is the turn of others; epoll tells again what is left
    constexpr size_t kKeptMax = 64u << 10, kTlsOwnBytesMax = 1u << 20;
    // Into less than a record TLS may leave text inside, of which epoll does not tell.
    const size_t room_min = tls_ != nullptr ? kTlsRecordBytes : 4096;
    for (int round = 0; round < kRoundsMax || (tls_ != nullptr && tls_->pending()); ++round) {
        if (server_.gives_ && is_quiet()) return true;  // what comes now is the other process's
        if (put_ != nullptr) {
            uint64_t received = 0;
            // Behind its turn it takes what TLS has inside, and no more.
            uint64_t most = round < kRoundsMax ? UINT64_MAX : tls_->pending_bytes();
            if (!receive_put(most, received)) return false;
            if (received == 0) return true;
            note_moved(received, now_ms);
            if (put_ != nullptr) continue;
        }
        std::span<std::byte> room = in_.room(room_min);
        ssize_t n = tls_ != nullptr ? tls_->receive(fd_.get(), room.data(), room.size())
                                    : ::recv(fd_.get(), room.data(), room.size(), 0);
        if (n == 0) return false;
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return false;
            // TLS may answer of itself.
            return held_by_tls() == 0 || (held_by_tls() <= kTlsOwnBytesMax && flush());
        }
        if (!is_inside()) pace_.restart(now_ms);
        note_moved(static_cast<uint64_t>(n), now_ms);
        in_.received(static_cast<size_t>(n));
        if (!serve()) return false;
        if (parked_ != nullptr || ended_) break;
        bool all = tls_ == nullptr && static_cast<size_t>(n) < room.size();
        if (all || backlog() > server_.options_.limits.send_backlog_bytes) break;
    }
    in_.shrink(kKeptMax);
    return true;
}

// Frames wait while the peer leaves its answers in the socket. When a flush made room, they are due at once:
// no event will come for bytes that were received before.
bool Connection::serve() {
    for (;;) {
        if (ended_) return flush();
        if (!parse_frames()) return false;
        bool waited = backlog() > server_.options_.limits.send_backlog_bytes;
        if (!flush()) return false;
        if (parked_ != nullptr || !waited || backlog() > server_.options_.limits.send_backlog_bytes)
            return true;
    }
}

bool Connection::parse_frames() {
    const Limits& limits = server_.options_.limits;
    while (backlog() <= limits.send_backlog_bytes && parked_ == nullptr) {
        std::optional<FrameHeader> header = in_.header();
        if (!header) return true;
        bool is_put = header->kind == Kind::kPut && remote_;
        // A PUT's length is that of its objects, checked by its rows. Before the proof a frame may be as
        // long as an AUTH, so that strangers cannot fill memory.
        uint32_t limit = is_put ? UINT32_MAX : proved() ? limits.frame_bytes : limits.handshake_bytes;
        if (std::optional<Error> wrong = unfit(*header, limit, "node", "node.frame_bytes_max")) {
            count(server_.metrics_.protocol_errors_total);
            return fail(wrong->code, wrong->text);
        }
        if (is_put) {
            whole_answers_ = out_.size();
            // The bytes of the objects stand behind the head, and nothing takes them: the connection ends.
            if (std::optional<Error> why = forbidden(header->kind)) return fail(why->code, why->text);
            Begun begun = begin_put(*header);
            // After the last words the socket stays until the caller has read them.
            if (begun != Begun::kYes) return begun == Begun::kNotYet || ended_;
            size_t taken = put_->take(in_.waiting().data(), in_.waiting().size());
            in_.take(taken);
            count(server_.metrics_.tcp_received_bytes_total, taken);
            if (!put_->complete()) return true;
            if (!finish_put()) return false;
            continue;
        }
        std::optional<Reader> body = in_.body(*header);
        if (!body) return true;
        whole_answers_ = out_.size();
        if (!handle(*header, *body)) return false;
        whole_answers_ = out_.size();
    }
    return true;
}

bool Connection::handle(const FrameHeader& header, Reader body) {
    if (!proved()) {
        if (header.kind != Kind::kAuth) return malformed("came before the handshake");
        return on_auth(header, body);
    }
    if (std::optional<Error> why = forbidden(header.kind)) {
        // A one-way frame has no answer.
        if ((header.flags & kFlagOneWay) != 0) return fail(why->code, why->text);
        return refuse(header.request_id, why->code, why->text);
    }
    NodeMetrics& m = server_.metrics_;
    switch (header.kind) {
        case Kind::kLease: {
            if (remote_)
                return refuse(header.request_id, Code::kInvalidArgument,
                              "memory is leased to processes of the node's own host only; send a PUT");
            Timed timed(m.lease);
            return on_lease(header, body);
        }
        case Kind::kCommit: {
            Timed timed(m.commit);
            return on_commit(header, body);
        }
        case Kind::kLookup: {
            Timed timed(m.lookup);
            return on_lookup(header, body);
        }
        case Kind::kRead: {
            Timed timed(m.lookup);
            return on_read(header, body);
        }
        default:
            break;
    }
    // What comes often, or may be slow, has a histogram of its own.
    Timed timed(m.other);
    switch (header.kind) {
        case Kind::kOpenSpace:
            return on_open_space(header, body);
        case Kind::kReturn:
            return on_return(body);
        case Kind::kRelease:
            return on_release(body);
        case Kind::kTouch:
            return on_touch(body);
        case Kind::kRemove:
            return on_remove(header, body);
        case Kind::kList:
            return on_list(header, body);
        case Kind::kStat:
            return on_stat(header);
        case Kind::kDescribe:
            return on_describe(header, body);
        default:
            return malformed("has a kind that this node does not know");
    }
}

// What the role of the tenant's key leaves out.
std::optional<Error> Connection::forbidden(Kind kind) const {
    const std::string& tenant = pool_->tenant();
    switch (kind) {
        case Kind::kLease:
        case Kind::kCommit:
        case Kind::kPut:
        case Kind::kRemove:
            if (!access_.may_write()) return may_not_write(access_, tenant);
            break;
        case Kind::kList:
            if (!access_.may_list()) return may_not_list(access_, tenant);
            break;
        default:
            break;
    }
    return std::nullopt;
}

bool Connection::check_key() {
    if (!proved() || ended_ || server_.options_.tenants->stands(pool_->tenant(), access_)) return true;
    count(server_.metrics_.auth_failures_total);
    unpark();  // what it waits for would be answered behind the end
    Error why = key_withdrawn(pool_->tenant());
    note_refusal(why.code, why.text);
    return fail(why.code, why.text);
}

bool Connection::on_auth(const FrameHeader& header, Reader body) {
    Result<uint16_t> version = agree_on_auth(header, {"this node", server_.options_.versions});
    if (!version) {
        count(server_.metrics_.protocol_errors_total);
        return fail(version.error().code, version.error().text);
    }
    std::string_view tenant = body.text16();
    std::string_view client_nonce_bytes = body.bytes(32);
    std::string_view mac = body.bytes(32);
    // Of what serves it, where that is not the store.
    std::string_view service = body.left() != 0 ? body.text16() : std::string_view();
    if (!body.done()) return malformed("is no AUTH");
    Nonce client_nonce;
    std::memcpy(client_nonce.data(), client_nonce_bytes.data(), client_nonce.size());
    // Both sides contribute a nonce, so a recorded handshake is of no use to either. The tenant is part of
    // the proof, and the service.
    std::string covered = service.empty() ? std::string(tenant) : mac_tenant(tenant, service);
    const ServerOptions& options = server_.options_;
    std::optional<Proved> proved =
        prove_access(mac, options.token, options.tenants.get(), nonce_, client_nonce, server_.incarnation_,
                     tenant, covered, *version);
    if (std::string why = options.token.take_trouble(); !why.empty()) {
        server_.journal_->note(Level::kWarning, "token", "unix", why);
    }
    if (!proved) {
        count(server_.metrics_.auth_failures_total);
        NotProved refusal =
            not_proved(options.tenants.get(), tenant, "give client and node the same token file");
        return fail(Code::kAuth, refusal.text, refusal.noted);
    }
    auto it = server_.pools_.find(tenant);
    if (it == server_.pools_.end()) {
        count(server_.metrics_.auth_failures_total);
        return fail(Code::kAuth, "this node has no such tenant");
    }
    auto proof = handshake_mac(Role::kNode, proved->secret, nonce_, client_nonce, server_.incarnation_,
                               covered, *version);
    if (std::optional<Range> range = relayed_range(kServiceDirectory, service))
        return on_auth_for_master(header, tenant, *range, proof, proved->access);
    if (!service.empty()) return fail(Code::kAuth, "this node has no such service");
    Pool& pool = *it->second;
    // A reader gets the arena read-only, too.
    Fd arena_read_only;
    if (!proved->access.may_write()) {
        Result<Fd> fd = pool.arena_read_only_fd();
        if (!fd) return fail(Code::kOs, fd.error().text);
        arena_read_only = std::move(*fd);
    }
    // Opened read-only for this client: it may map the index, but not write to it, whatever it does.
    Result<Fd> index_fd = pool.table().index().read_only_fd();
    if (!index_fd) return fail(Code::kOs, index_fd.error().text);

    // The descriptors travel with the first byte of WELCOME, so it goes out by itself, after what was queued.
    if (!flush() || backlog() != 0) return false;
    std::vector<std::byte> frame;
    frame.reserve(1024);  // in one go; it is longer with long names only
    size_t at = begin_frame(frame, Kind::kWelcome, kFlagAnswer, header.request_id);
    Writer w(frame);
    w.bytes(proof.data(), proof.size());
    server_.write_welcome(w, pool, proved->access);
    finish_frame(frame, at);

    iovec part{frame.data(), frame.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(2 * sizeof(int));
    int fds[2] = {arena_read_only.valid() ? arena_read_only.get() : pool.arena_fd(), index_fd->get()};
    std::memcpy(CMSG_DATA(rights), fds, sizeof(fds));
    // A fresh socket takes so few bytes at once; one that does not is not worth a partial send with
    // descriptors.
    if (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(frame.size())) return false;
    pool_ = &pool;
    access_ = proved->access;
    return true;
}

// The relay sends the WELCOME, once it knows whether the master is there.
bool Connection::on_auth_for_master(const FrameHeader& header, std::string_view tenant, const Range& range,
                                    const Mac& proof, const Access& access) {
    if (server_.relay_ == nullptr) return fail(Code::kProtocol, "this node passes no questions to a master");
    if (range.count != server_.relay_->ranges()) {
        return fail(Code::kInvalidArgument, "this node's cluster.master has " +
                                                std::to_string(server_.relay_->ranges()) +
                                                " ranges, and the caller asks for range " + range.text() +
                                                ": give both the same list");
    }
    if (!flush() || backlog() != 0 || !in_.waiting().empty()) return false;
    relayed_.emplace();
    relayed_->tenant = tenant;
    relayed_->range = range;
    relayed_->proof = proof;
    relayed_->access = access;
    relayed_->request_id = header.request_id;
    return false;
}

bool Connection::refuse(uint64_t request_id, Code code, const std::string& text) {
    write_error(out_, code, text, request_id);
    return true;
}

// A caller that is refused before it proved itself is news for an operator: a process with a wrong token.
void Connection::note_refusal(Code code, const std::string& text) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    bool known = ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid != 0;
    server_.journal_->note(Level::kWarning, code == Code::kAuth ? "auth_refused" : "protocol_refused",
                           known ? "process " + std::to_string(peer.pid) : "unix", text);
}

bool Connection::fail(Code code, const std::string& text, const std::string& noted) {
    cut_off_ = true;
    if (!proved()) note_refusal(code, noted.empty() ? text : noted);
    // Half an answer may stand behind the whole ones.
    queue_.truncate(whole_answers_);
    refuse(0, code, text);
    if (!flush()) return false;
    if (remote_) {
        // Nothing of ours is mapped over there. The socket stays until the caller has read why.
        for (auto& [id, pinned] : pins_) release(pinned);
        pins_.clear();
        if (put_ != nullptr) close_put();
        ended_ = true;
        in_.clear();
        ::shutdown(fd_.get(), SHUT_WR);
        return true;
    }
    if (pins_.empty() && leases_.empty()) return false;
    // The client still maps the arena: what it holds stays its own until it has hung up, or it would read, or
    // write, memory that has become another object's.
    ended_ = true;
    in_.clear();
    ::shutdown(fd_.get(), SHUT_WR);
    return true;
}

// After the end: waits for the client to hang up.
bool Connection::discard() {
    constexpr int kRoundsMax = 16;  // then it is the turn of others; epoll tells again what is left
    std::byte nothing[4096];
    for (int round = 0; round < kRoundsMax; ++round) {
        ssize_t n = ::recv(fd_.get(), nothing, sizeof(nothing), 0);
        if (n == 0) return false;
        if (n < 0 && errno != EINTR) return errno == EAGAIN;
    }
    return true;
}

bool Connection::malformed(const char* what) {
    count(server_.metrics_.protocol_errors_total);
    return fail(Code::kProtocol, std::string("a frame ") + what + "; the connection is closed");
}

bool Connection::on_events(uint32_t events) {
    bool alive = true;
    if ((events & EPOLLOUT) != 0) alive = flush() && serve();
    if (alive && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) alive = on_readable(now_ms());
    if (!alive) server_.drop(fd());
    if (alive && server_.gives_ && is_quiet() && !ends_here_) server_.mute(*this);
    return alive;
}

bool Connection::on_tick(uint64_t now_ms) {
    bool alive = check_deadlines(now_ms);
    if (!alive) server_.drop(fd());
    return alive;
}

// At most 1 MiB for each turn, so that one fast reader does not keep the loop. Pieces that have gone out
// lose their pins here.
bool Connection::flush() {
    constexpr uint64_t kTurnBytes = 1u << 20;  // then it is the turn of others
    uint64_t sent = held_by_tls();
    bool alive = queue_.flush(fd_.get(), tls_.get(), kTurnBytes, sent_pieces_, sent);
    sent -= std::min<uint64_t>(sent, held_by_tls());
    sent_some_ |= sent != 0;
    // Without a look at the clock where the socket took all.
    if (sent != 0 && unsent()) pace_.moved(sent, now_ms());
    for (const OutPiece& piece : sent_pieces_) pool_->table().unpin(piece.slot, piece.generation);
    sent_pieces_.clear();
    if (alive) want_events();
    return alive;
}

void Connection::want_events() {
    bool listens = backlog() <= server_.options_.limits.send_backlog_bytes && parked_ == nullptr;
    uint32_t events = (unsent() ? EPOLLOUT : 0u) | (listens ? EPOLLIN : 0u);
    // A TCP client that leaves raises nothing else, and its pins and leases would stay.
    if (parked_ != nullptr) events |= EPOLLRDHUP;
    if (events == events_) return;
    server_.loop_->watch(fd_.get(), events);
    events_ = events;
}

bool Connection::check_deadlines(uint64_t now_ms) {
    constexpr uint64_t kLastWordsMs = 2000;
    // A process of this host maps the arena: what it holds stays its own until it hangs up, however long
    // that takes. A remote one holds nothing any more and has two seconds to read the reason.
    if (ended_) return !remote_ || now_ms - progress_ms_ < kLastWordsMs;
    const Limits& limits = server_.options_.limits;
    if (!proved() && now_ms - since_ms_ > limits.handshake_ms) {
        count(server_.metrics_.handshake_timeouts_total);
        return fail(Code::kTimeout, "the handshake took over " + std::to_string(limits.handshake_ms) + " ms");
    }
    if (std::exchange(sent_some_, false)) progress_ms_ = now_ms;
    if (parked_ != nullptr) {
        progress_ms_ = now_ms;  // it is the node that lets its frames wait
        pace_.restart(now_ms);
        return true;
    }
    // A process of this host maps the arena, and what it holds is its own until it ends. Another host's reads
    // by frames: one that says nothing for so long may have been stopped, or have forgotten what it holds.
    if (remote_ && !pins_.empty() && now_ms - progress_ms_ > limits.remote_pin_idle_ms) {
        count(server_.metrics_.pins_idle_total);
        return fail(Code::kTimeout, "pins were held for " + std::to_string(limits.remote_pin_idle_ms / 1000) +
                                        " s without a word (node.remote_pin_idle_s)");
    }
    if (!is_inside()) pace_.restart(now_ms);
    return !pace_.is_late(now_ms) || fail(Code::kTimeout, FramePace::late_text(limits));
}

void Connection::note_moved(uint64_t bytes, uint64_t now_ms) {
    progress_ms_ = now_ms;
    pace_.moved(bytes, now_ms);
}

}  // namespace moonpool
