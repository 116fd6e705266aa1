// The calls of a DirectoryClient; directory_client_dial.cpp has how it gets its connection.
//
// Callers hold io_mutex_ for the whole of a call and drive the socket themselves. The thread "mp-dial" owns
// no socket but the one it has just opened, which it leaves in Dialing for the next caller (ready).
//
//   call: IoLock -> ready() -> CallTimeout -> ask() or ask_in_pieces() -> answer
//                                                                      \-> lost(): "mp-dial" dials again
//
// Lock order: io_mutex_, then Dialing::mutex. close() takes the second alone, so that it ends a call in
// progress: it shuts down live_fd_, which wakes the caller.
//
// Cost of locate(): 16 bytes a key to the master, in frames of at most 256 KiB of which 4 are under way; a
// caller polls 50 us for its answer before it sleeps. members() costs nothing until members_ms have passed.
//
// States of the connection: none (connected_ is false, and "mp-dial" has been asked for one), left in
// Dialing::socket for the next caller, in use (connected_). Only callers move it from the second to the
// third state (ready) and from the third to the first (lost), each under io_mutex_. Answers come in the
// order of the questions; after an error of sending or receiving the connection is given up, because the next
// bytes could belong to a former question.
#include "directory/directory_client.hpp"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "base/clock.hpp"
#include "base/wait_budget.hpp"
#include "directory/protocol.hpp"
#include "directory/questions.hpp"
#include "wire/limits.hpp"

namespace moonpool {

namespace {

constexpr size_t kHashesPerFrame = kQuestionKeysMax;
constexpr size_t kFramesAhead = 4;  // questions on their way: the master works while the last answer travels
constexpr uint32_t kAnswerMax = 64u << 20;
constexpr int kListsMax = 1024;  // MASTERS frames in a row

// How long a caller polls for its answer before it sleeps: waking a thread of a virtual machine takes longer
// than the master needs.
constexpr std::chrono::microseconds kSpin{50};

ssize_t receive_soon(ControlSocket& socket, void* data, size_t size) {
    static const bool alone = std::thread::hardware_concurrency() < 2;
    if (!alone) {
        auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            ssize_t n = socket.receive(data, size, false);
            if (n >= 0 || errno != EAGAIN) return n;
            ::sched_yield();  // the master may wait for this very core
        } while (std::chrono::steady_clock::now() < end);
    }
    return socket.receive(data, size, true);
}

}  // namespace

// A call's hold of the socket. Time spent waiting for it counts against the caller's budget, unless a
// connection came of it.
class SCOPED_CAPABILITY DirectoryClient::IoLock {
   public:
    explicit IoLock(DirectoryClient& client) ACQUIRE(client.io_mutex_) : mutex_(client.io_mutex_) {
        if (mutex_.try_lock()) return;
        auto since = Clock::now();
        mutex_.lock();
        if (!client.connected_) WaitBudget::spent_since(since);
    }
    ~IoLock() RELEASE() { mutex_.unlock(); }
    IoLock(const IoLock&) = delete;

   private:
    Mutex& mutex_;
};

// A call's turn at the socket, with io_mutex_ held and a connection: it waits no longer than its caller's
// budget lasts. The analysis does not see that client_'s mutex is the caller's.
class DirectoryClient::CallTimeout {
   public:
    explicit CallTimeout(DirectoryClient& client) REQUIRES(client.io_mutex_) : client_(client) {
        client.waits_ms_ = WaitBudget::within(client.options_.timeout_ms);
        if (client.waits_ms_ > 0) set(client.waits_ms_);
    }
    ~CallTimeout() NO_THREAD_SAFETY_ANALYSIS {
        if (client_.waits_ms_ > 0) set(client_.options_.timeout_ms);
    }
    CallTimeout(const CallTimeout&) = delete;

    Status status() const NO_THREAD_SAFETY_ANALYSIS {
        if (client_.waits_ms_ > 0) return success();
        return Error{Code::kTimeout, "others left no time of this call to ask the master"};
    }

    // The call has done something else for so long, and may have waited for others, since its question went
    // out. Where that left no time, the answer has come, or stops coming soon.
    static void renew(DirectoryClient& client, Clock::duration since) NO_THREAD_SAFETY_ANALYSIS {
        constexpr int kWaitMin = 100;
        const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
        int ms = WaitBudget::within(client.waits_ms_ - static_cast<int>(std::min<int64_t>(took, INT_MAX)));
        ms = std::min(std::max(ms, kWaitMin), client.waits_ms_);
        if (ms == client.waits_ms_) return;
        client.waits_ms_ = ms;
        set(client, ms);
    }
    // The answer is there: those that follow have their own time.
    static void restore(DirectoryClient& client) NO_THREAD_SAFETY_ANALYSIS {
        const int ms = std::max(WaitBudget::within(client.options_.timeout_ms), client.waits_ms_);
        if (ms == client.waits_ms_) return;
        client.waits_ms_ = ms;
        set(client, ms);
    }

   private:
    void set(int ms) NO_THREAD_SAFETY_ANALYSIS {
        if (client_.waits_ms_ != client_.options_.timeout_ms) set(client_, ms);
    }
    static void set(DirectoryClient& client, int ms) NO_THREAD_SAFETY_ANALYSIS {
        if (!client.socket_.fd.valid()) return;
        client.socket_.timeout_ms = ms;
        set_socket_timeouts(client.socket_.fd.get(), ms);
    }
    DirectoryClient& client_;
};

// What a call does between its question and the answer: once, also where the question is asked again.
class DirectoryClient::Meanwhile {
   public:
    explicit Meanwhile(const std::function<void()>& work) : work_(work) {}

    void run(DirectoryClient& client) {
        if (done_ || !work_) return;
        done_ = true;
        const auto begun = Clock::now();
        work_();
        CallTimeout::renew(client, Clock::now() - begun);
        renewed_ = true;
    }
    // Behind the first answer.
    void answered(DirectoryClient& client) {
        if (std::exchange(renewed_, false)) CallTimeout::restore(client);
    }

   private:
    const std::function<void()>& work_;
    bool done_ = false, renewed_ = false;
};

// A call's question, with io_mutex_ held; again, over another connection, where that has ended, or where it
// was the own node that failed. Each question may be asked twice: a version that is given and not used counts
// as a removal that its client did not end.
Status DirectoryClient::with_master(const std::function<Status()>& question) {
    for (bool again = false;; again = true) {
        if (Status status = ready(); !status) return status;
        CallTimeout timeout(*this);
        if (Status status = timeout.status(); !status) return status;
        again_ = false;
        Status status = question();
        if (status || again || !again_) return status;
    }
}

// Between two calls: the other end has closed the connection, or says why it is about to. Only a call reads
// from it. Where the masters are, as said meanwhile, is heard first.
bool DirectoryClient::has_ended() {
    // A call without time asks nothing: what has begun to come is left to the next one, which can wait for
    // it.
    if (WaitBudget::within(options_.timeout_ms) <= 0) return false;
    std::optional<CallTimeout> timeout;
    for (int lists = 0; lists < kListsMax; ++lists) {
        FrameHeader header;
        ssize_t n;
        do {
            n = socket_.receive(&header, sizeof(header), false);
        } while (n < 0 && errno == EINTR);
        if (n < 0) return errno != EAGAIN;
        const auto have = static_cast<size_t>(n);
        if (have == 0) return true;
        if (!timeout) timeout.emplace(*this);  // the rest of what has begun to come is waited for
        if (have < sizeof(header) &&
            !receive(reinterpret_cast<std::byte*>(&header) + have, sizeof(header) - have))
            return true;
        if (header.magic != kMagic || header.kind != Kind::kMasters || !hear_masters(header)) return true;
    }
    return true;
}

Status DirectoryClient::send_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        ssize_t n = socket_.send(bytes.data(), bytes.size(), true);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return peer_failed({Code::kTimeout, peer() + " took no bytes in time"});
        }
        if (n < 0) {
            const std::string why = std::strerror(errno);
            if (std::optional<Error> refusal = last_words()) return *refusal;
            return peer_failed({Code::kUnavailable, "the connection to " + peer() + " is lost: " + why});
        }
        bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return success();
}

// Of a connection that the other end has closed: why, if it has said so. What this end sent since does not
// take away what came before.
std::optional<Error> DirectoryClient::last_words() {
    constexpr uint32_t kBytesMax = 4096;
    FrameHeader header;
    if (socket_.receive(&header, sizeof(header), false) != static_cast<ssize_t>(sizeof(header)) ||
        header.magic != kMagic || header.kind != Kind::kError || header.length > kBytesMax)
        return std::nullopt;
    body_.resize(header.length);
    if (socket_.receive(body_.data(), body_.size(), false) != static_cast<ssize_t>(body_.size()))
        return std::nullopt;
    Reader body(body_);
    return refused(read_error(body));
}

// By an error frame that names no question, behind which the connection ends.
Error DirectoryClient::refused(Error error) {
    return error.code == Code::kUnavailable ? peer_failed(std::move(error)) : lost(std::move(error));
}

Status DirectoryClient::receive(void* data, size_t size) {
    auto* at = static_cast<std::byte*>(data);
    while (size != 0) {
        ssize_t n = receive_soon(socket_, at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return peer_failed({Code::kTimeout, peer() + " did not answer in time"});
        }
        if (n <= 0) {
            return peer_failed({Code::kUnavailable, peer() + " closed the connection"});
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return success();
}

uint64_t DirectoryClient::begin(Kind kind) {
    frame_at_ = begin_frame(out_, by_node_ ? Kind::kRelay : kind, 0, next_request_);
    // The node has three quarters of the time, so that its word that the master is silent arrives.
    Writer w(out_);
    if (by_node_) RelayHead{static_cast<uint32_t>(waits_ms_) * 3 / 4, kind}.write(w);
    return next_request_++;
}

// The header is checked before its length is used. An error frame that names no question ends the connection,
// too: the master sends it only when it is about to close.
Status DirectoryClient::receive_answer(Kind kind, uint64_t request_id, const Parse& parse) {
    FrameHeader header;
    for (int lists = 0;; ++lists) {
        if (Status status = receive(&header, sizeof(header)); !status) return status;
        if (lists == kListsMax) return lost({Code::kProtocol, peer() + " says again and again where it is"});
        if (header.magic != kMagic || header.kind != Kind::kMasters) break;
        if (Status status = hear_masters(header); !status) return status;
    }
    if (header.magic != kMagic || header.version != kVersion || header.length > kAnswerMax) {
        return lost({Code::kProtocol, peer() + " does not speak the protocol of a Moonpool master"});
    }
    body_.resize(header.length);
    if (Status status = receive(body_.data(), body_.size()); !status) return status;
    Reader body(body_);
    // A refusal of this question alone, or of the connection.
    if (header.kind == Kind::kError && header.request_id == request_id) {
        Error error = read_error(body);
        if (by_node_ && error.code == Code::kTimeout) WaitBudget::spent(waits_ms_ * 3 / 4);  // of the node
        return error;
    }
    if (header.kind == Kind::kError) return refused(read_error(body));
    if (header.request_id != request_id || header.kind != kind || !parse(body)) {
        return lost({Code::kProtocol, peer() + " sent an answer that does not fit the question"});
    }
    return success();
}

Status DirectoryClient::ask(Kind kind, const Build& build, const Parse& parse, Meanwhile* meanwhile) {
    out_.clear();
    uint64_t id = begin(kind);
    Writer w(out_);
    build(w);
    finish_frame(out_, frame_at_);
    if (Status status = send_all(out_); !status) return status;
    if (meanwhile != nullptr) meanwhile->run(*this);
    return receive_answer(kind, id, parse);
}

// In frames of at most kHashesPerFrame hashes, a few on their way at a time. more(): false ends it early.
Status DirectoryClient::ask_in_pieces(Kind kind, std::span<const Hash128> hashes,
                                      const std::function<void(Writer&, uint32_t)>& head, const Parse& parse,
                                      const std::function<bool()>& more, Meanwhile* meanwhile) {
    // At most kFramesAhead questions are unanswered. More would let master and client both wait with full
    // socket buffers, each for the other to read.
    uint64_t first_id = next_request_;
    size_t sent = 0, answered = 0;
    size_t frames = std::max<size_t>((hashes.size() + kHashesPerFrame - 1) / kHashesPerFrame, 1);
    while (answered < frames) {
        bool go_on = more();
        // Frames that are on their way have to be answered even when more() has said no: their answers
        // stand before those of the next call.
        if (!go_on && sent == answered) return success();
        out_.clear();
        for (; go_on && sent < frames && sent - answered < kFramesAhead; ++sent) {
            auto piece = hashes.subspan(sent * kHashesPerFrame);
            piece = piece.first(std::min(piece.size(), kHashesPerFrame));
            begin(kind);
            Writer w(out_);
            head(w, static_cast<uint32_t>(piece.size()));
            w.bytes(piece.data(), piece.size_bytes());
            finish_frame(out_, frame_at_);
        }
        if (Status status = send_all(out_); !status) return status;
        if (meanwhile != nullptr) meanwhile->run(*this);
        if (Status status = receive_answer(kind, first_id + answered, parse); !status) {
            // The answers to the others would stand before those of the next call.
            return connected_ && sent > answered + 1 ? lost(status.error()) : status.error();
        }
        if (meanwhile != nullptr) meanwhile->answered(*this);
        ++answered;
    }
    // One call with very many keys must not pin its buffer for the client's life.
    if (out_.capacity() > (1u << 20)) decltype(out_)().swap(out_);
    return success();
}

Result<LocateAnswer> DirectoryClient::locate(std::span<const Hash128> hashes, const LocateOptions& options,
                                             const std::function<void()>& meanwhile) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    LocateAnswer answer;
    Meanwhile once(meanwhile);
    Status status =
        with_master([&]() REQUIRES(io_mutex_) { return locate_now(hashes, options, answer, once); });
    if (!status) return status.error();
    return answer;
}

Status DirectoryClient::locate_now(std::span<const Hash128> hashes, const LocateOptions& options,
                                   LocateAnswer& answer, Meanwhile& meanwhile) {
    answer = {};
    uint16_t width = std::max<uint16_t>(options.width, 1);
    uint64_t epoch = 0;
    bool gap = false;
    size_t expected = 0;
    Status status = ask_in_pieces(
        Kind::kLocate, hashes,
        [&](Writer& w, uint32_t n) {
            LocateHead head{.holders_max = options.holders_max, .n = n};
            head.flags = static_cast<uint8_t>((options.prefix ? kLocatePrefix : 0) |
                                              (options.suspects ? kLocateSuspects : 0));
            // Width 1, whatever the caller's: the master cuts a prefix to whole blocks within a frame only,
            // and blocks may span frames. The cut is made below, over all frames.
            head.width = 1;
            head.write(w);
        },
        [&](Reader& r) {
            epoch = r.number<uint64_t>();
            auto n = r.number<uint32_t>();
            size_t piece = std::min(kHashesPerFrame, hashes.size() - expected);
            // A prefix may end early (n < piece); from that key on answers of frames already sent are read
            // and dropped (gap).
            expected += piece;
            if (!r.ok() || n > piece || (n < piece && !options.prefix)) return false;
            for (uint32_t i = 0; i < n; ++i) read_holders(r, gap ? nullptr : &answer.keys);
            gap |= n < piece;
            hear(r);
            return r.ok();
        },
        [&] { return !gap; }, &meanwhile);
    if (!status) return status;
    if (options.prefix) answer.keys.cut(answer.keys.size() / width * width);
    // Holders are ids, and ids mean nodes only together with the list of members of the same epoch.
    if (Status fits = fit_members(epoch); !fits) return fits;
    answer.members = members_.current();
    return success();
}

Result<OrderAnswer> DirectoryClient::order(std::span<const Hash128> hashes, const Incarnation* placing,
                                           bool unique) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    OrderAnswer answer;
    Status status =
        with_master([&]() REQUIRES(io_mutex_) { return order_now(hashes, placing, unique, answer); });
    if (!status) return status.error();
    return answer;
}

Status DirectoryClient::order_now(std::span<const Hash128> hashes, const Incarnation* placing, bool unique,
                                  OrderAnswer& answer) {
    answer = {};
    const Version known = newest();
    uint16_t width = order_width(members_.current().get(), placing);
    if (unique && width == 0) {  // else no other client would hear that the key is being put
        if (Status fresh = refresh_members(); !fresh) return fresh;
        width = order_width(members_.current().get(), placing);
        if (width == 0) return Error{Code::kUnavailable, "this host's node has not joined the pool yet"};
    }
    Status status = ask_in_pieces(
        Kind::kLocate, hashes,
        [=](Writer& w, uint32_t n) {
            uint8_t flags = kLocateSuspects | kLocateOrder | (unique ? kLocateUnique : 0);
            LocateHead head{.flags = flags, .width = width, .n = n};
            head.write(w);
        },
        [&](Reader& r) {
            answer.epoch = r.number<uint64_t>();
            auto n = r.number<uint32_t>();
            if (!r.ok() || n > hashes.size() - answer.at.keys.size()) return false;
            for (uint32_t i = 0; i < n; ++i) read_holders(r, &answer.at.keys);
            hear(r);
            if (!r.ok() || r.left() == 0) return r.ok();  // of an earlier version
            auto first = r.number<Version>();
            for (uint32_t i = 0; i < n; ++i) answer.versions.push_back(first + i);
            answer.filling |= r.number<uint8_t>() != 0;
            for (uint32_t i = 0; unique && r.ok() && r.left() != 0 && i < n; ++i)
                answer.taken.push_back(static_cast<Taken>(r.number<uint8_t>()));
            return r.ok();
        },
        [] { return true; });
    if (!status) return status;
    // Of several masters the one that has taken over gives later versions than all before. The own node may
    // have a connection to the other one, and is not asked for a while.
    if (addresses_.size() > 1 && !answer.versions.empty() && answer.versions.front() <= known) {
        if (by_node_) no_node_until_ms_ = now_ms() + static_cast<uint64_t>(options_.back_to_node_ms);
        return lost({Code::kUnavailable, "another master has taken over from the one that was asked"});
    }
    if (answer.versions.size() != hashes.size()) answer.versions.clear();
    if (answer.taken.size() != hashes.size()) answer.taken.clear();
    if (Status fits = fit_members(answer.epoch); !fits) return fits;
    answer.at.members = members_.current();
    return success();
}

Result<std::vector<Version>> DirectoryClient::ordered(const OrderDone& done,
                                                      const std::function<void()>& meanwhile) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    std::vector<Version> last;
    Meanwhile once(meanwhile);
    Status status = with_master([&]() REQUIRES(io_mutex_) {
        last.clear();
        // The frames of order(): each has versions that follow one another.
        for (size_t begin = 0; begin < done.keys.size(); begin += kHashesPerFrame) {
            size_t n = std::min(kHashesPerFrame, done.keys.size() - begin);
            OrderedFrame frame(done, begin, n);
            auto parse = [&](Reader& r) {
                if (r.number<uint32_t>() != n) return false;
                for (size_t i = 0; i < n; ++i) last.push_back(r.number<Version>());
                return r.ok();
            };
            Status asked = ask(
                Kind::kOrdered, [&](Writer& w) { frame.write(w); }, parse, &once);
            if (!asked) return asked;
        }
        return success();
    });
    if (!status) return status.error();
    return last;
}

// With the epoch that it has: the master sends what changed since. Where the node shares its list, it asks
// for that, and its word is that the list is as of now.
Status DirectoryClient::refresh_members() {
    if (file_) {
        bool in_file = false;
        Status status = ask(
            Kind::kMembers,
            [&](Writer& w) REQUIRES(io_mutex_) { members_.write_question(w, kMembersTake | kMembersByFile); },
            [&](Reader& r) REQUIRES(io_mutex_) {
                Reader head = r;
                head.number<uint64_t>();
                in_file = (head.number<uint8_t>() & kMembersInFile) != 0;
                if (in_file) {
                    r = head;
                } else if (!members_.read(now_ms(), r)) {
                    return false;
                }
                hear(r);
                return head.ok();
            });
        if (!status || !in_file || take_members(now_ms())) return status;
    }
    return ask(
        Kind::kMembers, [&](Writer& w) REQUIRES(io_mutex_) { members_.write_question(w); },
        [&](Reader& r) REQUIRES(io_mutex_) {
            if (!members_.read(now_ms(), r)) return false;
            hear(r);
            return true;
        });
}

// The list that names the holders in an answer of that epoch.
Status DirectoryClient::fit_members(uint64_t epoch) {
    if (members_.fits(now_ms(), epoch)) return success();
    if (file_ && take_members(std::nullopt) && members_.fits(now_ms(), epoch)) return success();
    return refresh_members();
}

// As the node's list says it; heard_ms: when the master did, nothing: as the list says. False: the list
// cannot be read, is not of this connection's master, or is older than what is known.
bool DirectoryClient::take_members(std::optional<uint64_t> heard_ms) {
    std::optional<MembersHead> head = file_->head();
    std::vector<std::byte> rows, answer;
    auto fits = [&]() REQUIRES(io_mutex_) {
        return head && head->life == life_ && head->epoch >= members_.epoch();
    };
    if (!fits()) return false;
    const bool changed = head->epoch != members_.epoch();
    if (changed) head = file_->read(rows);  // of a later epoch by now, maybe
    if (!fits()) return false;
    // An answer to MEMBERS is made of it.
    Writer w(answer);
    w.number(head->epoch);
    w.number(static_cast<uint8_t>((head->flags & kMembersFilling) | (changed ? kMembersChanged : 0)));
    w.bytes(rows.data(), rows.size());
    w.number(head->newest);
    Reader r(answer);
    if (!members_.read(heard_ms.value_or(head->heard_ms), r)) return false;
    hear(r);
    return true;
}

void DirectoryClient::hear(Reader& r) {
    if (!r.ok() || r.left() < sizeof(Version)) return;  // of an earlier version
    auto newest = r.number<Version>();
    if (newest > newest_.load(std::memory_order_relaxed)) newest_.store(newest, std::memory_order_relaxed);
}

Result<std::shared_ptr<const Members>> DirectoryClient::members(bool fresh) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    if (members_.current() != nullptr && !fresh && !members_.due(now_ms()) && !closed_) {
        return members_.current();
    }
    Status status = with_master([&]() REQUIRES(io_mutex_) -> Status {
        // Another process of the host may have asked a moment ago.
        if (!fresh && file_ && take_members(std::nullopt) && !members_.due(now_ms())) return success();
        return refresh_members();
    });
    // While the master is away the last list serves on, except for a caller that insists on a fresh one.
    if (!status && (fresh || members_.current() == nullptr || closed_)) return status.error();
    return members_.current();
}

Result<std::vector<NodeId>> DirectoryClient::place(uint64_t bytes, uint16_t n, const PlaceOptions& options) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    std::vector<NodeId> chosen;
    auto build = [&](Writer& w) {
        w.number(bytes);
        w.number(n);
        w.number(static_cast<uint8_t>(options.evict ? kPlaceEvict : 0));
        w.number(uint8_t{0});
        w.number(static_cast<uint16_t>(options.avoid_nodes.size()));
        w.number(static_cast<uint16_t>(options.avoid_host_ids.size()));
        for (NodeId node : options.avoid_nodes) w.number(node);
        for (const std::string& host : options.avoid_host_ids) w.text16(host);
    };
    auto parse = [&](Reader& r) {
        chosen.resize(r.number<uint16_t>());
        for (NodeId& node : chosen) node = r.number<NodeId>();
        hear(r);
        return r.ok() && chosen.size() <= n;
    };
    Status status = with_master([&]() REQUIRES(io_mutex_) { return ask(Kind::kPlace, build, parse); });
    if (!status) return status.error();
    return chosen;
}

Result<uint32_t> DirectoryClient::forget(std::span<const Hash128> hashes, std::span<const NodeId> unreached,
                                         const std::function<void()>& meanwhile) {
    if (fork_.in_child()) return forked();
    IoLock lock(*this);
    uint32_t rows = 0;
    Meanwhile once(meanwhile);
    Status status = with_master([&]() REQUIRES(io_mutex_) {
        rows = 0;
        return ask_in_pieces(
            Kind::kForget, hashes, [&](Writer& w, uint32_t n) { write_forget_head(w, n, unreached); },
            [&](Reader& r) {
                rows += r.number<uint32_t>();
                return r.ok();
            },
            [] { return true; }, &once);
    });
    if (!status) return status.error();
    return rows;
}

Error DirectoryClient::forked() {
    return Error{Code::kForked, "this handle belongs to the parent process; open a new one after fork"};
}

}  // namespace moonpool
