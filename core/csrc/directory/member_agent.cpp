// The agent's thread: one connection at a time, and a pause between two of them.
//
//   dial -> join -> inventory -> { changes, beats, answers }* -> leave, or an error -> pause, and dial again
//
// Each turn (step) sends what is due, and then waits for the socket, for wake() or for the next deadline. The
// log keeps rows from the JOIN on, so that the inventory, which is read piece by piece behind it, is complete
// with them.
//
// Who waits for what: the agent's thread alone waits for the store's loop (the hooks) and for the master.
// The store's loop only appends to the DeltaLog and wakes the agent.
//
// drops_done_ is the number of drops carried out for this seat; the master repeats all that come after it
// in every answer. It survives a connection, and begins anew with a seat (JOIN that is not resumed). So a
// drop is carried out at least once and confirmed only afterwards.
#include "directory/member_agent.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/dial.hpp"
#include "wire/limits.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kMemberAnswerMax = 8u << 20;
constexpr size_t kReadBytes = 65536;
static_assert(kReadBytes >= kTlsRecordBytes, "a poll of the socket does not tell of the rest of a record");

}  // namespace

MemberAgent::MemberAgent(MemberAgentOptions options, MemberHooks hooks, DeltaLog& log)
    : options_(std::move(options)), hooks_(std::move(hooks)), log_(log) {
    wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    state_.why_not = "the node has not yet connected to the master at " + options_.master;
}

MemberAgent::~MemberAgent() { stop(); }

Status MemberAgent::start() {
    if (thread_.started()) return success();
    stopping_ = false;
    return thread_.start("mp-member", [this] { run(); });
}

// In a child of fork() the thread is the parent's: it is neither told nor waited for.
void MemberAgent::stop() {
    if (!thread_.in_child()) {
        stopping_ = true;
        wake();
    }
    (void)thread_.join();
}

void MemberAgent::wake() {
    uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
}

MemberAgent::State MemberAgent::state() const {
    MutexLock lock(state_mutex_);
    State state = state_;
    if (answered_at_ != Clock::time_point{}) {
        state.answered_ms = static_cast<uint64_t>(
            std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - answered_at_).count());
    }
    return state;
}

// Called after each failed attempt. The journal hears only of a lost membership and of a reason that is
// new, not of each attempt.
void MemberAgent::set_why_not(const std::string& why) {
    bool was_joined = false, is_news = false;
    {
        MutexLock lock(state_mutex_);
        was_joined = std::exchange(state_.joined, false);
        is_news = std::exchange(state_.why_not, why) != why;
    }
    if (options_.journal == nullptr || stopping_ || !(was_joined || is_news)) return;
    options_.journal->note(Level::kWarning, was_joined ? "left_master" : "not_joined", options_.master,
                           (was_joined ? "is no longer in the pool: " : "has not joined the pool: ") + why);
}

void MemberAgent::run() {
    int backoff_ms = options_.backoff_first_ms;
    while (!stopping_) {
        DialOptions dial_options;
        dial_options.address = options_.master;
        dial_options.token = options_.token;
        dial_options.service = kServiceMember;
        dial_options.timeout_ms = options_.timeout_ms;
        dial_options.interface = options_.interface;
        dial_options.given_up = &stopping_;
        dial_options.tls = options_.tls;
        Result<Dialed> dialed = dial(dial_options);
        if (dialed) {
            Link link;
            link.socket = {std::move(dialed->fd), std::move(dialed->tls), options_.timeout_ms};
            link.peer = dialed->peer;
            ClosedInChildren closed_in_children(link.socket.fd);
            uint64_t joins = counters_.joins_total;
            Status status = live(link);
            // A connection that joined shows that the master works: the next attempt comes soon. One that
            // is refused at the JOIN keeps the growing pause.
            if (counters_.joins_total != joins) backoff_ms = options_.backoff_first_ms;
            if (!status) set_why_not(status.error().text);
        } else {
            counters_.connect_failures_total.fetch_add(1);
            set_why_not(dialed.error().text);
        }
        // Without a connection changes are not recorded: the next inventory has them.
        log_.pause();
        if (stopping_) break;
        auto end = Clock::now() + std::chrono::milliseconds(backoff_ms);
        // wake() may come for other reasons as well: only the deadline or stop() ends the pause.
        while (!stopping_ && Clock::now() < end) {
            auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
            pollfd wait{wake_.get(), POLLIN, 0};
            if (::poll(&wait, 1, static_cast<int>(left) + 1) > 0) {
                uint64_t value;
                (void)!::read(wake_.get(), &value, sizeof(value));
            }
        }
        backoff_ms = std::min(backoff_ms * 2, options_.backoff_longest_ms);
    }
}

// The log records from before the first piece of the inventory is read; a change that the inventory does
// not have is therefore in the log.
Status MemberAgent::live(Link& link) {
    if (Status status = join(link); !status) return status;
    log_.begin_inventory();
    link.inventory = true;
    link.next_beat = Clock::now();
    while (!stopping_) {
        if (Status status = step(link); !status) return status;
    }
    send_leave(link);
    return success();
}

// Best effort: a master that takes no bytes now suspects the node, and gives it up later.
void MemberAgent::send_leave(Link& link) {
    out_.clear();
    size_t at = begin_frame(out_, Kind::kLeave, kFlagOneWay, 0);
    finish_frame(out_, at);
    (void)link.socket.send(out_.data(), out_.size(), false);
}

// One turn: whatever is due, then a wait for the next thing that will be.
Status MemberAgent::step(Link& link) {
    auto now = Clock::now();
    if (now >= link.next_beat && !link.beat_open) {
        if (Status status = send_beat(link); !status) return status;
    }
    if (link.beat_open && now - link.asked_at > std::chrono::milliseconds(options_.timeout_ms)) {
        return Error{Code::kTimeout, "the master at " + link.peer + " did not answer in time"};
    }
    if (link.inventory) {
        if (Status status = tell_inventory(link); !status) return status;
    }
    auto batch = std::chrono::milliseconds(options_.batch_ms);
    size_t waiting = log_.size();
    // A full frame goes at once; fewer rows wait for up to batch_ms, so that a busy store sends some large
    // frames and not many small ones.
    if (waiting >= link.rows_max || now - link.told_at >= batch) {
        if (Status status = tell_changes(link); !status) return status;
        waiting = 0;
    }
    // Next: the answer, the next beat, the end of the batch, or the first row of one.
    auto until =
        link.beat_open ? link.asked_at + std::chrono::milliseconds(options_.timeout_ms) : link.next_beat;
    if (waiting != 0) until = std::min(until, link.told_at + batch);
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    // While an inventory is being told the socket is looked at between two pieces, without a wait.
    int timeout_ms = link.inventory ? 0 : static_cast<int>(std::clamp<long>(left + 1, 0, 1000));
    pollfd waits[2] = {{link.socket.fd.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (::poll(waits, 2, timeout_ms) < 0 && errno != EINTR) return os_error("poll");
    if (waits[1].revents != 0) {
        uint64_t value;
        (void)!::read(wake_.get(), &value, sizeof(value));
    }
    if (waits[0].revents != 0) return read_answers(link, false);
    return success();
}

Status MemberAgent::join(Link& link) {
    NodeLoad load;
    if (!hooks_.load(load)) return Error{Code::kTimeout, "the node's store did not answer in time"};
    out_.clear();
    size_t at = begin_frame(out_, Kind::kJoin, 0, link.next_request++);
    Writer w(out_);
    write_identity(w, options_.identity);
    write_load(w, load);
    write_event_endpoints(w, options_.identity);
    finish_frame(out_, at);
    if (Status status = send_frame(link); !status) return status;
    uint64_t joins = counters_.joins_total;
    while (counters_.joins_total == joins) {
        if (Status status = read_answers(link, true); !status) return status;
    }
    return success();
}

// One beat at a time is open: the next one is due only after the answer, or the time limit that step() sets
// on it.
Status MemberAgent::send_beat(Link& link) {
    NodeLoad load;
    if (!hooks_.load(load)) return Error{Code::kTimeout, "the node's store did not answer in time"};
    out_.clear();
    size_t at = begin_frame(out_, Kind::kBeat, 0, link.next_request++);
    Writer w(out_);
    w.number(drops_done_);
    write_load(w, load);
    finish_frame(out_, at);
    link.beat_open = true;
    link.asked_at = Clock::now();
    link.next_beat = link.asked_at + std::chrono::milliseconds(link.beat_ms);
    counters_.beats_total.fetch_add(1);
    return send_frame(link);
}

// One piece. It is sent before any change that comes later is taken from the log; so the last word about a
// key is always the latest one.
Status MemberAgent::tell_inventory(Link& link) {
    rows_.clear();
    if (!hooks_.inventory(link.cursor, rows_)) {
        return Error{Code::kTimeout, "the node's store did not answer in time"};
    }
    bool last = link.cursor == 0;
    // A piece of the store without rows needs no frame, except the first and the last, which carry the
    // flags.
    if (rows_.empty() && !last && link.begun) return success();
    Status sent = send_rows(link, rows_, link.begun ? 0 : kDeltaBegin, last ? kDeltaEnd : 0);
    link.begun = true;
    if (!sent || !last) return sent;
    link.inventory = false;
    counters_.inventories_total.fetch_add(1);
    link.next_beat = Clock::now();  // its answer says what to drop
    bool was_joined = false;
    {
        MutexLock lock(state_mutex_);
        was_joined = std::exchange(state_.joined, true);
        state_.why_not.clear();
    }
    if (!was_joined && options_.journal != nullptr) {
        options_.journal->note(Level::kInfo, "joined", options_.master,
                               "has joined the pool as node " + std::to_string(id_));
    }
    return success();
}

Status MemberAgent::tell_changes(Link& link) {
    rows_.clear();
    link.told_at = Clock::now();
    // The log overflowed and has lost changes. Only another inventory makes the master's rows exact again;
    // the rows of the former one count until its end.
    if (!log_.take(rows_)) {
        log_.begin_inventory();
        link.inventory = true;
        link.begun = false;
        link.cursor = 0;
        return success();
    }
    return rows_.empty() ? success() : send_rows(link, rows_, 0, 0);
}

// At least one frame, even without rows: its flags mark the begin or the end of an inventory.
Status MemberAgent::send_rows(Link& link, const std::vector<DeltaRow>& rows, uint8_t first_flags,
                              uint8_t last_flags) {
    size_t sent = 0;
    do {
        size_t n = std::min<size_t>(link.rows_max, rows.size() - sent);
        auto flags =
            static_cast<uint8_t>((sent == 0 ? first_flags : 0) | (sent + n == rows.size() ? last_flags : 0));
        out_.clear();
        out_.reserve(sizeof(FrameHeader) + 8 + n * kDeltaRowBytes);
        size_t at = begin_frame(out_, Kind::kDelta, kFlagOneWay, 0);
        Writer w(out_);
        w.number(uint32_t{flags});
        w.number(static_cast<uint32_t>(n));
        for (size_t i = sent; i < sent + n; ++i) write_row(w, rows[i]);
        finish_frame(out_, at);
        if (Status status = send_frame(link); !status) return status;
        sent += n;
    } while (sent < rows.size());
    counters_.rows_sent_total.fetch_add(rows.size());
    if (out_.capacity() > (1u << 16)) decltype(out_)().swap(out_);
    return success();
}

Status MemberAgent::send_frame(Link& link) {
    size_t sent = 0;
    while (sent < out_.size()) {
        ssize_t n = link.socket.send(out_.data() + sent, out_.size() - sent, true);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return Error{Code::kTimeout, "the master at " + link.peer + " took no bytes in time"};
        }
        if (n < 0) {
            return Error{Code::kUnavailable, "the connection to the master at " + link.peer +
                                                 " is lost: " + std::strerror(errno)};
        }
        sent += static_cast<size_t>(n);
    }
    return success();
}

// Reads once, and handles all whole frames that are there. wait: for the first bytes, up to the socket's
// time limit.
Status MemberAgent::read_answers(Link& link, bool wait) {
    std::span<std::byte> room = link.in.room(kReadBytes);
    ssize_t n;
    do {
        n = link.socket.receive(room.data(), room.size(), wait);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) {
        if (!wait) return success();
        return Error{Code::kTimeout, "the master at " + link.peer + " did not answer in time"};
    }
    if (n <= 0) return Error{Code::kUnavailable, "the master at " + link.peer + " closed the connection"};
    link.in.received(static_cast<size_t>(n));
    while (std::optional<FrameHeader> header = link.in.header()) {
        if (unfit(*header, kMemberAnswerMax, "node", "")) {
            return Error{Code::kProtocol, link.peer + " does not speak the protocol of a Moonpool master"};
        }
        std::optional<Reader> body = link.in.body(*header);
        if (!body) break;
        if (Status status = on_answer(link, *header, *body); !status) return status;
    }
    return success();
}

Status MemberAgent::on_answer(Link& link, const FrameHeader& header, Reader body) {
    Error nonsense{Code::kProtocol, link.peer + " sent an answer that does not fit the question"};
    if (header.kind == Kind::kError) return read_error(body);
    uint64_t epoch = 0;
    Drops drops;
    if (header.kind == Kind::kJoin) {
        NodeId id = body.number<NodeId>();
        bool resumed = (body.number<uint8_t>() & kJoinResumed) != 0;
        body.number<uint8_t>();
        // The master is another process, perhaps of another version: its numbers are brought within bounds
        // that cannot stop this thread or make it spin.
        link.beat_ms = std::clamp<uint32_t>(body.number<uint32_t>(), 1, 60000);
        link.rows_max = std::max<uint32_t>(body.number<uint32_t>(), 1);
        epoch = body.number<uint64_t>();
        if (!read_drops(body, drops)) return nonsense;
        if (!resumed) drops_done_ = 0;  // another seat, or another master: it counts anew
        id_ = id;
        counters_.joins_total.fetch_add(1);
    } else if (header.kind == Kind::kBeat) {
        epoch = body.number<uint64_t>();
        if (!read_drops(body, drops)) return nonsense;
        link.beat_open = false;
    } else {
        return nonsense;
    }
    {
        MutexLock lock(state_mutex_);
        state_.id = id_;
        state_.epoch = epoch;
        answered_at_ = Clock::now();
    }
    uint64_t done = drops_done_;
    if (Status status = carry_out(drops); !status) return status;
    if (drops_done_ != done) link.next_beat = Clock::now();  // the master waits to hear it, and may have more
    return success();
}

// `first` is the number of drops before this list. An overlap with what is done is skipped, because answers
// repeat what is not yet confirmed. When the store does not answer, nothing is confirmed, and the
// connection ends.
Status MemberAgent::carry_out(const Drops& drops) {
    uint64_t end = drops.first + drops.hashes.size();
    if (end <= drops_done_) return success();
    bool all = drops.all && drops.first > drops_done_;
    uint64_t skip = drops_done_ > drops.first ? drops_done_ - drops.first : 0;
    std::vector<Hash128> due(drops.hashes.begin() + static_cast<std::ptrdiff_t>(skip), drops.hashes.end());
    if (!hooks_.drop(all, due)) return Error{Code::kTimeout, "the node's store did not answer in time"};
    counters_.dropped_total.fetch_add(due.size());
    drops_done_ = end;
    return success();
}

}  // namespace moonpool
