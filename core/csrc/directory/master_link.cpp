// One connection, on the master's loop. It parses frames and writes answers; what they mean is Master's
// matter. All bytes of a peer are untrusted: each handler compares counts with the bytes that are there
// before it reads rows.
//
// Input and output are coupled. Answers wait in out_, and while more than send_backlog_bytes wait, no frame
// is parsed and no byte is read (want_events), so that a peer that does not read its answers stops being
// served and costs bounded memory. out_sent_ is how far the socket has taken out_; whole_answers_ is where
// the last whole answer ends, for fail() cuts a half one off.
//
// The handlers return false when the connection is over; then drop() destroys this object, and nothing of
// it may be touched.
#include "directory/master_link.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "directory/protocol.hpp"

namespace moonpool {

MasterLink::MasterLink(MasterServer& server, AuthenticatedConnection caller, LinkId id, bool is_member,
                       uint64_t now_ms)
    : server_(server),
      socket_{std::move(caller.fd), std::move(caller.tls)},
      tenant_(std::move(caller.tenant)),
      peer_(std::move(caller.peer)),
      id_(id),
      is_member_(is_member),
      progress_ms_(now_ms) {}

// Whatever ended the connection, the member is suspect from now on, unless it has said that it leaves.
MasterLink::~MasterLink() {
    if (node_ != kNoNode) server_.master_.disconnected(node_, id_);
}

bool MasterLink::begin() {
    if (!flush()) return false;
    // What came behind the proof; no event will tell of it.
    return socket_.tls == nullptr || !socket_.tls->pending() || on_readable(progress_ms_);
}

bool MasterLink::on_readable(uint64_t now_ms) {
    constexpr int kRoundsMax = 8;  // then it is the turn of others; epoll tells again what is left
    // Room for one whole record, so that nothing of it is left where epoll does not see it.
    constexpr size_t kKeptMax = 64u << 10;
    const size_t room_min = socket_.tls != nullptr ? kTlsRecordBytes : 4096;
    for (int round = 0; round < kRoundsMax; ++round) {
        std::span<std::byte> room = in_.room(room_min);
        ssize_t n = socket_.receive(room.data(), room.size(), false);
        if (n == 0) return false;
        if (n < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN;
        }
        progress_ms_ = now_ms;
        in_.received(static_cast<size_t>(n));
        if (!serve(now_ms)) return false;
        // A record is never larger than the room; the socket may hold more of them.
        bool all = socket_.tls == nullptr && static_cast<size_t>(n) < room.size();
        if (all || backlog() > server_.options_.limits.send_backlog_bytes) break;
    }
    // A large DELTA must not keep its buffer while the node only beats.
    in_.shrink(kKeptMax);
    return true;
}

// Writing comes first: room in the backlog lets frames that have been received be served.
bool MasterLink::on_events(uint32_t events) {
    uint64_t now = now_ms();
    bool alive = true;
    if ((events & EPOLLOUT) != 0) alive = flush() && serve(now);
    if (alive && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) alive = on_readable(now);
    if (!alive) server_.drop(socket_.fd.get());
    return alive;
}

// Frames wait while the peer leaves its answers in the socket. When a flush made room, they are due at once:
// no event will come for bytes that were received before.
bool MasterLink::serve(uint64_t now_ms) {
    for (;;) {
        if (!parse_frames(now_ms)) return false;
        bool waited = backlog() > server_.options_.limits.send_backlog_bytes;
        if (!flush()) return false;
        if (!waited || backlog() > server_.options_.limits.send_backlog_bytes) return true;
    }
}

bool MasterLink::parse_frames(uint64_t now_ms) {
    const Limits& limits = server_.options_.limits;
    while (backlog() <= limits.send_backlog_bytes) {
        std::optional<FrameHeader> header = in_.header();
        if (!header) return true;
        // Before the body is there: its length is checked against the limit, so that a peer cannot make the
        // master buffer more.
        if (std::optional<Error> wrong =
                unfit(*header, limits.frame_bytes, "master", "master.frame_bytes_max")) {
            server_.metrics_.protocol_errors_total.fetch_add(1);
            return fail(wrong->code, wrong->text);
        }
        std::optional<Reader> body = in_.body(*header);
        if (!body) return true;
        whole_answers_ = out_.size();
        if (!handle(*header, *body, now_ms)) return false;
        whole_answers_ = out_.size();
    }
    return true;
}

// The service that the connection was opened for decides what it may ask. A frame of the other
// service is malformed here.
bool MasterLink::handle(const FrameHeader& header, Reader body, uint64_t now_ms) {
    MasterServerMetrics& m = server_.metrics_;
    if (is_member_) {
        switch (header.kind) {
            case Kind::kJoin: {
                Timed timed(m.join);
                return on_join(header, body, now_ms);
            }
            case Kind::kDelta: {
                Timed timed(m.delta);
                return on_delta(body, now_ms);
            }
            case Kind::kBeat: {
                Timed timed(m.beat);
                return on_beat(header, body, now_ms);
            }
            case Kind::kLeave:
                return on_leave(now_ms);
            default:
                break;
        }
    } else {
        switch (header.kind) {
            case Kind::kMembers: {
                Timed timed(m.members);
                return on_members(header, body, now_ms);
            }
            case Kind::kLocate: {
                Timed timed(m.locate);
                return on_locate(header, body);
            }
            case Kind::kPlace: {
                Timed timed(m.place);
                return on_place(header, body);
            }
            case Kind::kForget: {
                Timed timed(m.forget);
                return on_forget(header, body, now_ms);
            }
            default:
                break;
        }
    }
    return malformed("has a kind that this connection does not know");
}

bool MasterLink::on_join(const FrameHeader& header, Reader body, uint64_t now_ms) {
    NodeIdentity identity;
    NodeLoad load;
    if (!read_identity(body, identity) || identity.name.empty() || !read_load(body, load) ||
        !read_event_endpoints(body, identity)) {
        return malformed("is no JOIN");
    }
    if (node_ != kNoNode) return malformed("joins a second time");
    Result<Master::JoinAnswer> joined = server_.master_.join(now_ms, identity, load, id_);
    if (!joined) {
        server_.journal_->note(Level::kWarning, "join_refused", peer_, joined.error().text);
        return fail(joined.error().code, joined.error().text);
    }
    node_ = joined->id;
    // The node's former connection, which may hang half open for minutes. Its destructor finds that it is
    // no longer the node's link and reports nothing.
    if (joined->close != kNoLink) server_.close_link(joined->close);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(node_);
    w.number(static_cast<uint8_t>(joined->resumed ? kJoinResumed : 0));
    w.number(uint8_t{0});
    // The master sets the pace and the frame size, so that they are configured in one place for the
    // cluster.
    w.number(server_.options_.beat_ms);
    w.number(server_.options_.master.hashes_per_frame);
    w.number(server_.master_.membership().epoch());
    write_drops(w, server_.master_.drops(node_), server_.options_.master.drops_per_answer);
    finish_frame(out_, at);
    return true;
}

// Whether this connection still speaks for its node: an incarnation ends by silence, or another connection
// has it.
bool MasterLink::seated() const { return node_ != kNoNode && server_.master_.current(node_, id_); }

// One way: no answer. The node learns that it lost its seat by the error frame that ends the connection.
bool MasterLink::on_delta(Reader body, uint64_t now_ms) {
    auto flags = body.number<uint8_t>();
    body.bytes(3);
    auto n = body.number<uint32_t>();
    if (!body.ok() || n > server_.options_.master.hashes_per_frame ||
        body.left() != uint64_t{n} * kDeltaRowBytes) {
        return malformed("is no DELTA");
    }
    if (!seated()) return fail(Code::kClosed, "this node is no longer in the pool; join again");
    if (!server_.master_.delta(now_ms, node_, id_, flags, body.bytes(body.left()))) {
        return malformed("has a row that makes no sense");
    }
    return true;
}

bool MasterLink::on_beat(const FrameHeader& header, Reader body, uint64_t now_ms) {
    auto drops_done = body.number<uint64_t>();
    NodeLoad load;
    if (!read_load(body, load)) return malformed("is no BEAT");
    if (!seated()) return fail(Code::kClosed, "this node is no longer in the pool; join again");
    server_.master_.beat(now_ms, node_, id_, load, drops_done);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(server_.master_.membership().epoch());
    write_drops(w, server_.master_.drops(node_), server_.options_.master.drops_per_answer);
    finish_frame(out_, at);
    return true;
}

// The seat is cleared at once. The node closes the connection afterwards, and the destructor's report finds
// no member.
bool MasterLink::on_leave(uint64_t now_ms) {
    if (!seated()) return fail(Code::kClosed, "this node is no longer in the pool");
    server_.note_left(node_);
    server_.master_.left(now_ms, node_, id_);
    return true;
}

bool MasterLink::on_members(const FrameHeader& header, Reader body, uint64_t now_ms) {
    auto known = body.number<uint64_t>();
    if (!body.ok()) return malformed("is no MEMBERS");
    const Membership& membership = server_.master_.membership();
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(membership.epoch());
    bool changed = known != membership.epoch();
    // Told with every answer, also when the list has not changed: the end of the filling moves no epoch.
    bool filling = server_.master_.filling(now_ms);
    w.number(static_cast<uint8_t>((changed ? kMembersChanged : 0) | (filling ? kMembersFilling : 0)));
    if (changed) {
        Members members = membership.current(now_ms);
        w.number(static_cast<uint32_t>(members.rows.size()));
        for (const Member& member : members.rows) write_member(w, member);
        for (const Member& member : members.rows) write_event_endpoints(w, member.identity);
    }
    finish_frame(out_, at);
    return true;
}

// u8 flags, u8 holders at most, u16 width, u32 n, n hashes -> u64 epoch, u32 n, per key u8 count and holders
bool MasterLink::on_locate(const FrameHeader& header, Reader body) {
    auto flags = body.number<uint8_t>();
    auto holders_max = body.number<uint8_t>();
    auto width = body.number<uint16_t>();
    auto n = body.number<uint32_t>();
    if (!body.ok() || body.left() != uint64_t{n} * sizeof(Hash128)) return malformed("is no LOCATE");
    // A frame is served in one piece on the loop; the limit bounds how long all others wait for it.
    if (n > server_.options_.master.hashes_per_frame) return malformed("asks for more keys than the limit");
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(server_.master_.membership().epoch());
    server_.master_.locate(body.bytes(body.left()), flags, holders_max, width, w);
    finish_frame(out_, at);
    return true;
}

// u64 bytes, u16 n, u8 flags, u8 zero, u16 nodes to avoid, u16 hosts to avoid, nodes, hosts -> u16 n, nodes
bool MasterLink::on_place(const FrameHeader& header, Reader body) {
    auto bytes = body.number<uint64_t>();
    auto n = body.number<uint16_t>();
    auto flags = body.number<uint8_t>();
    body.number<uint8_t>();
    auto nodes = body.number<uint16_t>();
    auto hosts = body.number<uint16_t>();
    // A host has two bytes of length at least. The check comes before the vectors are made, so that counts
    // alone cannot allocate.
    if (!body.ok() || uint64_t{nodes} * 2 + uint64_t{hosts} * 2 > body.left())
        return malformed("is no PLACE");
    std::vector<NodeId> avoid_nodes(nodes);
    for (NodeId& node : avoid_nodes) node = body.number<NodeId>();
    std::vector<std::string_view> avoid_hosts(hosts);
    for (std::string_view& host : avoid_hosts) host = body.text16();
    if (!body.ok()) return malformed("is no PLACE");
    std::vector<NodeId> chosen =
        server_.master_.place(tenant_, bytes, n, avoid_nodes, avoid_hosts, (flags & kPlaceEvict) != 0);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer w(out_);
    w.number(static_cast<uint16_t>(chosen.size()));
    for (NodeId id : chosen) w.number(id);
    finish_frame(out_, at);
    return true;
}

// u32 n, u16 unreached nodes, u16 zero, nodes, n hashes -> u32 rows
bool MasterLink::on_forget(const FrameHeader& header, Reader body, uint64_t now_ms) {
    auto n = body.number<uint32_t>();
    auto nodes = body.number<uint16_t>();
    body.number<uint16_t>();
    if (!body.ok() || body.left() != uint64_t{nodes} * 2 + uint64_t{n} * sizeof(Hash128)) {
        return malformed("is no FORGET");
    }
    if (n > server_.options_.master.hashes_per_frame) return malformed("forgets more keys than the limit");
    std::vector<NodeId> unreached(nodes);
    for (NodeId& node : unreached) node = body.number<NodeId>();
    uint32_t rows = server_.master_.forget(now_ms, body.bytes(body.left()), unreached);
    size_t at = begin_frame(out_, header.kind, kFlagAnswer, header.request_id);
    Writer(out_).number(rows);
    finish_frame(out_, at);
    return true;
}

bool MasterLink::refuse(uint64_t request_id, Code code, const std::string& text) {
    write_error(out_, code, text, request_id);
    return true;
}

bool MasterLink::fail(Code code, const std::string& text) {
    // Half an answer may stand behind the whole ones.
    out_.resize(std::max(out_sent_, std::min(out_.size(), whole_answers_)));
    refuse(0, code, text);
    flush();
    return false;
}

bool MasterLink::malformed(const char* what) {
    server_.metrics_.protocol_errors_total.fetch_add(1);
    return fail(Code::kProtocol, std::string("a frame ") + what + "; the connection is closed");
}

bool MasterLink::flush() {
    if (socket_.unsent()) {
        if (!socket_.flush()) return false;
        sent_some_ |= !socket_.unsent();
    }
    while (out_sent_ < out_.size()) {
        ssize_t n = socket_.send(out_.data() + out_sent_, out_.size() - out_sent_, false);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) break;
            return false;
        }
        out_sent_ += static_cast<size_t>(n);
        sent_some_ = true;
    }
    if (out_sent_ == out_.size()) {
        if (out_.capacity() > (1u << 16)) decltype(out_)().swap(out_);
        out_.clear();
        out_sent_ = 0;
    }
    want_events();
    return true;
}

void MasterLink::want_events() {
    uint32_t events = (backlog() != 0 || socket_.unsent() ? EPOLLOUT : 0u) |
                      (backlog() <= server_.options_.limits.send_backlog_bytes ? EPOLLIN : 0u);
    if (events == events_) return;
    server_.loop_->watch(socket_.fd.get(), events);
    events_ = events;
}

bool MasterLink::on_tick(uint64_t now_ms) {
    bool alive = check_deadlines(now_ms);
    if (!alive) server_.drop(socket_.fd.get());
    return alive;
}

// A quiet connection between frames is in order; the beat tells whether a node lives. Only a frame or an
// answer that has begun must move.
bool MasterLink::check_deadlines(uint64_t now_ms) {
    if (std::exchange(sent_some_, false)) progress_ms_ = now_ms;
    bool stalled = !in_.waiting().empty() || backlog() != 0 || socket_.unsent() ||
                   (socket_.tls != nullptr && socket_.tls->inside_record());
    const Limits& limits = server_.options_.limits;
    if (is_member_ && node_ == kNoNode && now_ms - progress_ms_ > limits.handshake_ms) {
        return fail(Code::kTimeout, "the node did not join in time");
    }
    if (stalled && now_ms - progress_ms_ > limits.stalled_frame_ms) {
        return fail(Code::kTimeout,
                    "nothing moved for " + std::to_string(limits.stalled_frame_ms) + " ms inside a frame");
    }
    return true;
}

}  // namespace moonpool
