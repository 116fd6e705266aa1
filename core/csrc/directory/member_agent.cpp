// The agent's thread: one connection at a time, and a pause between two of them. Each turn lets the protocol
// send what is due (MemberProtocol::step), and then waits for the socket, for wake() or for the next time at
// which something is due.
//
// Who waits for what: the agent's thread alone waits for the store's loop (the hooks) and for the master.
// The store's loop only appends to the DeltaLog and wakes the agent.
#include "directory/member_agent.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "directory/range_handshake.hpp"
#include "wire/dial.hpp"
#include "wire/limits.hpp"
#include "wire/tls.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kMemberAnswerMax = 8u << 20;
constexpr size_t kReadBytes = 65536;
constexpr int kIdleMs = 60000;  // without a master; set_master() and stop() end it
static_assert(kReadBytes >= kTlsRecordBytes, "a poll of the socket does not tell of the rest of a record");

}  // namespace

MemberAgent::MemberAgent(MemberAgentOptions options, MemberHooks hooks, DeltaLog& log)
    : options_(std::move(options)),
      protocol_({options_.identity, options_.timeout_ms, options_.batch_ms}, std::move(hooks), log, counters_,
                now_ms) {
    wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    master_ = options_.master;
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

void MemberAgent::abandon() {
    leaves_ = false;
    stopping_ = true;
    wake();
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
    options_.journal->note(Level::kWarning, was_joined ? "left_master" : "not_joined", place(),
                           (was_joined ? "is no longer in the pool: " : "has not joined the pool: ") + why);
}

// Programs of the node's user dial the master with the same files, and have no log of their own to say it in.
void MemberAgent::note_tls_files() {
    if (options_.tls == nullptr || options_.journal == nullptr) return;
    std::string why = options_.tls->take_trouble();
    if (!why.empty()) options_.journal->note(Level::kError, "tls_files", place(), std::move(why));
}

bool MemberAgent::set_master(const std::string& address) {
    {
        MutexLock lock(state_mutex_);
        if (!address.empty() && !at_.empty() && at_ != address) return false;
        if (master_ == address) return true;
        master_ = address;
    }
    wake();
    return true;
}

// False: another master was set while this one was dialed.
bool MemberAgent::begin(const std::string& master) {
    MutexLock lock(state_mutex_);
    if (master_ != master) return false;
    at_ = master;
    return true;
}

void MemberAgent::run() {
    int backoff_ms = options_.backoff_first_ms;
    std::string last = this->master();
    while (!stopping_) {
        const std::string master = this->master();
        if (std::exchange(last, master) != master) {
            protocol_.another_master();
            elsewhere_.reset();
            backoff_ms = options_.backoff_first_ms;
        }
        if (master.empty()) {
            pause(kIdleMs);
            continue;
        }
        // Two names of one master: this agent is needed when the other one's connection has ended.
        if (elsewhere_ && options_.claims->has(*elsewhere_)) {
            pause(options_.backoff_longest_ms);
            continue;
        }
        attempt(master, backoff_ms);
        if (is_over(master)) continue;
        auto end = Clock::now() + std::chrono::milliseconds(backoff_ms);
        // wake() may come for other reasons as well: only the deadline, stop() or another master ends it.
        while (!is_over(master) && Clock::now() < end) {
            auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
            pause(static_cast<int>(left) + 1);
        }
        backoff_ms = std::min(backoff_ms * 2, options_.backoff_longest_ms);
    }
}

// At most so long, and not after wake().
void MemberAgent::pause(int ms) {
    pollfd wait{wake_.get(), POLLIN, 0};
    if (::poll(&wait, 1, ms) <= 0) return;
    uint64_t value;
    (void)!::read(wake_.get(), &value, sizeof(value));
}

// One connection, if it comes about, to its end.
void MemberAgent::attempt(const std::string& master, int& backoff_ms) {
    std::string owner;
    DialOptions dial_options;
    dial_options.address = master;
    dial_options.token = options_.token;
    dial_options.service = kServiceMember;
    dial_options.timeout_ms = options_.timeout_ms;
    dial_options.interface = options_.interface;
    dial_options.given_up = &stopping_;
    dial_options.tls = options_.tls;
    dial_options.instead = &owner;
    Result<Dialed> dialed = dial_range(dial_options, options_.range);
    note_tls_files();
    if (dialed) {
        Link link;
        link.socket = {std::move(dialed->fd), std::move(dialed->tls), options_.timeout_ms};
        link.peer = dialed->peer;
        ClosedInChildren closed_in_children(link.socket.fd);
        const std::optional<MasterList> list = masters_of(dialed->welcome);
        if (list && options_.on_masters) options_.on_masters(*list, master);
        if (options_.claims != nullptr && !options_.claims->take(dialed->incarnation)) {
            elsewhere_ = dialed->incarnation;
            return set_why_not("the node has joined the master at " + master + " by another address");
        }
        elsewhere_.reset();
        uint64_t joins = counters_.joins_total;
        Status status = success();
        if (begin(master)) status = live(link, list.has_value() && options_.on_masters);
        if (options_.claims != nullptr) options_.claims->give_back(dialed->incarnation);
        // A connection that joined shows that the master works: the next attempt comes soon. One that
        // is refused at the JOIN keeps the growing pause.
        if (counters_.joins_total != joins) backoff_ms = options_.backoff_first_ms;
        if (!status) set_why_not(status.error().text);
        MutexLock lock(state_mutex_);
        at_.clear();
    } else {
        counters_.connect_failures_total.fetch_add(1);
        set_why_not(dialed.error().text);
        if (!owner.empty() && options_.on_owner) options_.on_owner(owner, master);
    }
    protocol_.disconnected();
}

// To the end of the connection, or of the agent: clients may still ask this master, also where another list
// of addresses lacks it. asks_for_masters: it knows MASTERS, and sends it whenever something of that changes.
Status MemberAgent::live(Link& link, bool asks_for_masters) {
    auto send = [&](std::span<const std::byte> frame) { return send_frame(link, frame); };
    Status status = protocol_.connected(link.peer, send);
    if (status && asks_for_masters) {
        std::vector<std::byte> question;
        write_masters_question(question);
        status = send_frame(link, question);
    }
    while (status && !stopping_) {
        status = protocol_.step();
        note_progress();
        if (status) status = wait(link);
    }
    if (status && leaves_) protocol_.leave();
    return status;
}

// For the socket, for wake() or for what is due next; then handles the answers that are there.
Status MemberAgent::wait(Link& link) {
    uint64_t now = now_ms();
    uint64_t due = std::max(protocol_.due_ms(), now);
    int timeout_ms = static_cast<int>(std::min<uint64_t>(due - now, 1000));
    pollfd waits[2] = {{link.socket.fd.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    if (::poll(waits, 2, timeout_ms) < 0 && errno != EINTR) return os_error("poll");
    if (waits[1].revents != 0) {
        uint64_t value;
        (void)!::read(wake_.get(), &value, sizeof(value));
    }
    if (waits[0].revents != 0) return read_answers(link);
    return success();
}

Status MemberAgent::send_frame(Link& link, std::span<const std::byte> frame) {
    while (!frame.empty()) {
        // The last frame of all is not waited for.
        ssize_t n = link.socket.send(frame.data(), frame.size(), !stopping_);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return Error{Code::kTimeout, "the master at " + link.peer + " took no bytes in time"};
        }
        if (n < 0) {
            return Error{Code::kUnavailable, "the connection to the master at " + link.peer +
                                                 " is lost: " + std::strerror(errno)};
        }
        frame = frame.subspan(static_cast<size_t>(n));
    }
    return success();
}

// Reads once, and handles all whole frames that are there.
Status MemberAgent::read_answers(Link& link) {
    std::span<std::byte> room = link.in.room(kReadBytes);
    ssize_t n;
    do {
        n = link.socket.receive(room.data(), room.size(), false);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) return success();
    if (n <= 0) return Error{Code::kUnavailable, "the master at " + link.peer + " closed the connection"};
    link.in.received(static_cast<size_t>(n));
    while (std::optional<FrameHeader> header = link.in.header()) {
        if (unfit(*header, kMemberAnswerMax, "node", "")) {
            return Error{Code::kProtocol, link.peer + " does not speak the protocol of a Moonpool master"};
        }
        std::optional<Reader> body = link.in.body(*header);
        if (!body) break;
        if (header->kind == Kind::kMasters && options_.on_masters) {
            MasterList list;
            if (list.read(*body)) options_.on_masters(list, link.peer);
            continue;
        }
        Status status = protocol_.on_frame(*header, *body);
        note_progress();
        if (!status) return status;
    }
    return success();
}

// For state(), after each step and each answer.
void MemberAgent::note_progress() {
    bool has_joined = false;
    {
        MutexLock lock(state_mutex_);
        state_.id = protocol_.id();
        state_.epoch = protocol_.epoch();
        state_.large_pool = protocol_.large_pool();
        if (std::exchange(answers_, protocol_.answers()) != protocol_.answers()) answered_at_ = Clock::now();
        if (protocol_.told() && !state_.joined) {
            has_joined = state_.joined = true;
            state_.why_not.clear();
        }
    }
    if (has_joined && options_.journal != nullptr) {
        options_.journal->note(Level::kInfo, "joined", place(),
                               "has joined the pool as node " + std::to_string(protocol_.id()));
    }
}

}  // namespace moonpool
