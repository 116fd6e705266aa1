// One connection, on the master's loop. It cuts what arrives into frames and sends answers; what a frame
// means is MasterProtocol's matter.
//
// Input and output are coupled. Answers wait in out_, and while more than send_backlog_bytes wait, no frame
// is parsed and no byte is read (want_events), so that a peer that does not read its answers stops being
// served and costs bounded memory. out_sent_ is how far the socket has taken out_; whole_answers_ is where
// the last whole answer ends, for fail() cuts a half one off.
//
// A function that returns false ends the connection; then drop() destroys this object, and nothing of it may
// be touched.
#include "directory/master_link.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "directory/protocol.hpp"

namespace moonpool {

MasterLink::MasterLink(MasterServer& server, AuthenticatedConnection caller, LinkId id, Caller kind,
                       uint64_t now_ms)
    : server_(server),
      socket_{std::move(caller.fd), std::move(caller.tls)},
      peer_(std::move(caller.peer)),
      id_(id),
      kind_(kind),
      protocol_(host(), id, kind, std::move(caller.tenant), caller.access),
      since_ms_(now_ms),
      pace_(server.options_.limits, now_ms) {}

MasterProtocolHost MasterLink::host() {
    return {.master = server_.master_,
            .beat_ms = server_.options_.beat_ms,
            .close_link = [this](LinkId link) { server_.close_link(link); },
            .on_leave = [this](NodeId node) { server_.note_left(node); },
            .on_join_refused =
                [this](const Error& why) {
                    server_.journal_->note(Level::kWarning, "join_refused", peer_, why.text);
                },
            .why_no_orders = [this] { return server_.pair_.why_no_orders(now_ms()); },
            .why_no_ends = [this] { return server_.pair_.why_no_ends(now_ms()); },
            .on_standby = [this](const std::string& name,
                                 const std::string& at) { return server_.attach_standby(*this, name, at); },
            .on_heard = [this] { server_.hear_standby(); },
            .on_standby_left = [this] { server_.standby_left_ = true; },
            .on_hand_over = [this](const std::string& address,
                                   uint32_t told) { return server_.begin_hand_over(address, told); },
            .masters = [this] { return server_.masters_now(); }};
}

MasterLink::~MasterLink() { protocol_.closed(); }

bool MasterLink::begin() {
    if (!flush()) return false;
    // What came behind the proof; no event will tell of it.
    return socket_.tls == nullptr || !socket_.tls->pending() || on_readable(since_ms_);
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
        if (!is_inside()) pace_.restart(now_ms);
        pace_.moved(static_cast<uint64_t>(n), now_ms);
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
    while (backlog() <= limits.send_backlog_bytes && !waits_for_hand_over()) {
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
        if (kind_ != Caller::kStandby) server_.tell_standby(now_ms);
    }
    return true;
}

// What a frame takes is measured by its kind.
LatencyHistogram* MasterLink::histogram(Kind kind) const {
    MasterServerMetrics& m = server_.metrics_;
    switch (kind) {
        case Kind::kJoin:
            return &m.join;
        case Kind::kDelta:
            return &m.delta;
        case Kind::kBeat:
            return &m.beat;
        case Kind::kMembers:
            return &m.members;
        case Kind::kLocate:
            return &m.locate;
        case Kind::kPlace:
            return &m.place;
        case Kind::kForget:
            return &m.forget;
        default:
            return nullptr;
    }
}

// The standby has the frame that makes it the owner, or is about to: what clients ask is asked there.
bool MasterLink::waits_for_hand_over() const {
    constexpr size_t kPostponedMax = 1u << 20;
    return kind_ == Caller::kClient && (server_.pair_.is_given() || postponed_bytes_ > kPostponedMax);
}

// Removals and replacements that have yet to begin, until it is known which master orders them.
bool MasterLink::postpones(const FrameHeader& header, Reader body) {
    if (kind_ != Caller::kClient || !server_.pair_.hands_over()) return false;
    if (header.kind == Kind::kLocate) return (LocateHead::read(body).flags & kLocateOrder) != 0;
    return header.kind == Kind::kForget;
}

void MasterLink::refuse_hand_over(const Error& why) { write_hand_over_refusal(out_, why); }

bool MasterLink::tell_masters(const MasterList& list) {
    if (!protocol_.takes_masters() || told_masters_ == list) return true;
    if (backlog() > server_.options_.limits.send_backlog_bytes) return true;  // a later tick tells it
    told_masters_ = list;
    write_masters_frame(out_, list);
    whole_answers_ = out_.size();  // fail() cuts nothing off that is sent in part
    return flush();
}

bool MasterLink::go_on() {
    const uint64_t now = now_ms();
    std::deque<Postponed> frames = std::exchange(postponed_, {});
    postponed_bytes_ = 0;
    for (const Postponed& frame : frames) {
        whole_answers_ = out_.size();
        if (!handle(frame.header, Reader(std::span<const std::byte>(frame.body)), now)) return false;
        whole_answers_ = out_.size();
    }
    return flush() && serve(now);
}

bool MasterLink::handle(const FrameHeader& header, Reader body, uint64_t now_ms) {
    if (postpones(header, body)) {
        std::string_view bytes = body.bytes(body.left());
        Postponed& frame = postponed_.emplace_back(header, std::vector<std::byte>(bytes.size()));
        std::memcpy(frame.body.data(), bytes.data(), bytes.size());
        postponed_bytes_ += sizeof(frame) + bytes.size();
        return true;
    }
    // Of a connection that has asked for all, and is still the one.
    const bool of_standby = header.kind == Kind::kMirrored || header.kind == Kind::kHandOver;
    if (kind_ == Caller::kStandby && of_standby && server_.standby_fd_ != socket_.fd.get())
        return fail(Code::kProtocol, "this connection is not the standby's");
    std::optional<Timed> timed;
    if (LatencyHistogram* histogram = this->histogram(header.kind)) timed.emplace(*histogram);
    Status status = protocol_.on_frame(now_ms, header, body, out_);
    if (status) {
        // Behind those that wait already, so that a client's places in the order reach it in their order.
        if (protocol_.promises() && (server_.pair_.waits() || !held_.empty())) hold(header.request_id);
        return true;
    }
    if (status.error().code == Code::kProtocol) server_.metrics_.protocol_errors_total.fetch_add(1);
    return fail(status.error().code, status.error().text);
}

// The answer that was just written, until the standby has heard. Others overtake it: where a host's processes
// share the connection, what they look up does not wait for another one's removal.
void MasterLink::hold(uint64_t request_id) {
    auto from = out_.begin() + static_cast<ptrdiff_t>(whole_answers_);
    held_.push_back({{from, out_.end()}, request_id, server_.pair_.word()});
    out_.erase(from, out_.end());
    held_bytes_ += held_.back().answer.size();
    server_.holding_.insert(socket_.fd.get());
}

bool MasterLink::refuse_held(const Error& why) {
    for (const Held& held : std::exchange(held_, {})) refuse(held.request_id, why.code, why.text);
    held_bytes_ = 0;
    return released();
}

bool MasterLink::refuse(uint64_t request_id, Code code, const std::string& text) {
    write_error(out_, code, text, request_id);
    return true;
}

bool MasterLink::fail(Code code, const std::string& text) {
    held_.clear();
    held_bytes_ = 0;
    // Half an answer may stand behind the whole ones.
    out_.resize(std::max(out_sent_, std::min(out_.size(), whole_answers_)));
    refuse(0, code, text);
    flush();
    return false;
}

bool MasterLink::flush() {
    uint64_t sent = 0;
    if (socket_.unsent()) {
        if (!socket_.flush()) return false;
        if (!socket_.unsent()) sent += kTlsRecordBytes;
    }
    while (!held_.empty() && server_.pair_.is_heard(held_.front().word, now_ms())) {
        const std::vector<std::byte>& answer = held_.front().answer;
        out_.insert(out_.end(), answer.begin(), answer.end());
        held_bytes_ -= answer.size();
        held_.pop_front();
    }
    while (out_sent_ < out_.size()) {
        ssize_t n = socket_.send(out_.data() + out_sent_, out_.size() - out_sent_, false);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) break;
            return false;
        }
        out_sent_ += static_cast<size_t>(n);
        sent += static_cast<uint64_t>(n);
    }
    // Without a look at the clock where the socket took all.
    if (sent != 0 && (out_sent_ < out_.size() || socket_.unsent())) pace_.moved(sent, now_ms());
    if (out_sent_ == out_.size()) {
        if (out_.capacity() > (1u << 16)) decltype(out_)().swap(out_);
        out_.clear();
        out_sent_ = 0;
    }
    want_events();
    return true;
}

bool MasterLink::released() { return flush() && serve(now_ms()); }

void MasterLink::write_mirror(uint64_t now_ms, uint8_t flags) {
    Master& master = server_.master_;
    master.mirror().cut(now_ms, master.mirror_head(flags), out_);
}

void MasterLink::want_events() {
    // What waits for the standby's word waits for no room in the socket.
    uint32_t events =
        (out_sent_ != out_.size() || socket_.unsent() ? EPOLLOUT : 0u) |
        (backlog() <= server_.options_.limits.send_backlog_bytes && !waits_for_hand_over() ? EPOLLIN : 0u);
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
    const Limits& limits = server_.options_.limits;
    if (kind_ == Caller::kNode && protocol_.node() == kNoNode && now_ms - since_ms_ > limits.handshake_ms) {
        return fail(Code::kTimeout, "the node did not join in time");
    }
    if (!is_inside()) pace_.restart(now_ms);
    return !pace_.is_late(now_ms) || fail(Code::kTimeout, FramePace::late_text(limits));
}

bool MasterLink::is_inside() const {
    return !in_.waiting().empty() || out_sent_ != out_.size() || socket_.unsent() ||
           (socket_.tls != nullptr && socket_.tls->inside_record());
}

}  // namespace moonpool
