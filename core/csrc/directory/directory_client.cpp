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
// order of the questions; after an error of sending or receiving the
// connection is given up, because the next bytes
// could belong to a former question.
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
#include "wire/address.hpp"
#include "wire/limits.hpp"

namespace moonpool {

namespace {

constexpr size_t kHashesPerFrame = kQuestionKeysMax;
constexpr size_t kFramesAhead = 4;  // questions on their way: the master works while the last answer travels
constexpr uint32_t kAnswerMax = 64u << 20;

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

DirectoryClient::DirectoryClient(DirectoryClientOptions options)
    : options_(std::move(options)),
      addresses_(options_.master, options_.range),
      members_(static_cast<uint64_t>(options_.members_ms)) {
    MutexLock lock(io_mutex_);
    if (options_.follow_key) key_ = options_.token.now()->front();
}

DirectoryClient::~DirectoryClient() { close(); }

void DirectoryClient::close() {
    closed_ = true;
    connected_ = false;
    // The thread does not exist in the child, and its mutex may be held there for ever: Dialing is leaked
    // on purpose.
    if (fork_.in_child()) {
        (void)dialing_.release();
        return;
    }
    std::unique_ptr<ServiceThread> dialer;
    {
        MutexLock lock(dialing_->mutex);
        dialer = std::move(dialing_->thread);
        if (int fd = live_fd_.load(); fd >= 0)
            ::shutdown(fd, SHUT_RDWR);  // wakes the caller that waits for an answer
        dialing_->wake.notify_all();
        dialing_->done.notify_all();
    }
    if (dialer != nullptr) (void)dialer->join();  // with no lock: it takes that one
}

// The thread dials when a call found no connection, and then pauses, longer after each failure.
void DirectoryClient::dial_loop() {
    int backoff_ms = options_.backoff_first_ms;
    Dialing& dialing = *dialing_;
    MutexLock lock(dialing.mutex);
    while (!closed_) {
        dialing.wake.wait(lock, [&]() REQUIRES(dialing.mutex) { return closed_ || dialing.wanted; });
        if (closed_) return;
        const bool only_node = dialing.only_node;
        std::optional<ByNode> by_node;
        lock.unlock();
        Result<Dialed> dialed = dial_any(only_node, by_node);
        lock.lock();
        dialing.once = true;
        if (dialed) {
            dialing.socket = {std::move(dialed->fd), std::move(dialed->tls), options_.timeout_ms};
            dialing.by_node = std::move(by_node);
            dialing.wanted = dialing.only_node = false;
            left_ = true;
            backoff_ms = options_.backoff_first_ms;
        } else if (!only_node) {
            dialing.why_not = dialed.error();
        }
        dialing.done.notify_all();
        if (dialed) continue;
        if (only_node) {  // the connection to the master serves on, or any is wanted by now
            dialing.wanted &= !std::exchange(dialing.only_node, false);
            continue;
        }
        // A caller that wants a connection meanwhile does not shorten the pause: a master that is down must
        // not be dialed at the rate of its clients' calls.
        dialing.wake.wait_for(lock, std::chrono::milliseconds(backoff_ms), [this] { return closed_.load(); });
        backoff_ms = std::min(backoff_ms * 2, options_.backoff_longest_ms);
    }
}

// The own node's word that the master is away is taken for the whole answer. Else a master that is back would
// be dialed by all processes of all hosts, because their nodes have not reached it yet.
Result<Dialed> DirectoryClient::dial_any(bool only_node, std::optional<ByNode>& by_node) {
    DialOptions to;
    to.token = options_.token;
    to.tenant = options_.tenant;
    to.service = relayed_service(kServiceDirectory, options_.range);
    to.timeout_ms = options_.timeout_ms;
    to.given_up = &closed_;
    const NodeRelay& node = options_.relay;
    if (node.connect != nullptr && now_ms() >= no_node_until_ms_ && node.answers()) {
        bool refused = false;
        to.address = node.name;
        to.connect = node.connect;
        to.refused = &refused;
        std::vector<Fd> fds;
        to.fds = &fds;
        Result<Dialed> dialed = dial(to);
        if (dialed) {
            Reader welcome(dialed->welcome);
            by_node.emplace().life = welcome.number<uint64_t>();
            if (fds.size() == 1) by_node->members = std::move(fds.front());
        }
        if (dialed || (refused && dialed.error().code == Code::kUnavailable) || closed_) return dialed;
        no_node_until_ms_ = now_ms() + static_cast<uint64_t>(options_.back_to_node_ms);
        to.connect = nullptr;
        to.refused = nullptr;
        to.fds = nullptr;
    }
    if (only_node) return Error{Code::kUnavailable, "the own node does not pass questions on"};
    to.service = kServiceDirectory;
    to.interface = options_.interface;
    to.tls = options_.tls;
    return addresses_.dial(to);
}

// Once a second.
bool DirectoryClient::has_new_key() {
    constexpr uint64_t kLookMs = 1000;
    const uint64_t now = now_ms();
    if (now < look_at_key_ms_) return false;
    look_at_key_ms_ = now + kLookMs;
    const std::string former = std::exchange(key_, options_.token.now()->front());
    return key_ != former;
}

// Whether the connection that there is serves the next call.
bool DirectoryClient::keeps_way() {
    if (!connected_) return false;
    if (has_ended() || (options_.follow_key && has_new_key())) {
        connected_ = false;
        dial_at_once();
        return false;
    }
    if (options_.relay.connect == nullptr) return true;
    if (by_node_) {
        if (options_.relay.answers()) return true;
        connected_ = false;
        dial_at_once();
        return false;
    }
    if (left_) return false;
    const uint64_t now = now_ms();
    if (now < back_at_ms_) return true;
    back_at_ms_ = now + static_cast<uint64_t>(options_.back_to_node_ms);
    if (now < no_node_until_ms_ || !options_.relay.answers()) return true;
    MutexLock lock(dialing_->mutex);
    if (!closed_ && !dialing_->wanted) {
        dialing_->wanted = dialing_->only_node = true;
        dialing_->wake.notify_all();
    }
    return true;
}

// Between two calls: the other end has closed the connection, or says why it is about to. Only a call reads
// from it.
bool DirectoryClient::has_ended() {
    FrameHeader last_words;
    ssize_t n;
    do {
        n = socket_.receive(&last_words, sizeof(last_words), false);
    } while (n < 0 && errno == EINTR);
    return n >= 0 || errno != EAGAIN;
}

// The next call waits for the result, as the first one does: the master may well be there.
void DirectoryClient::dial_at_once() {
    MutexLock lock(dialing_->mutex);
    if (closed_) return;
    dialing_->once = false;
    dialing_->only_node = false;
    dialing_->wanted = true;
    dialing_->wake.notify_all();
}

Status DirectoryClient::start_dialer(Dialing& dialing) {
    if (dialing.thread != nullptr) return success();
    auto dialer = std::make_unique<ServiceThread>();
    if (Status status = dialer->start("mp-dial", [this] { dial_loop(); }); !status) return status;
    dialing.thread = std::move(dialer);
    return success();
}

void DirectoryClient::begin_to_dial() {
    if (fork_.in_child()) return;
    Dialing& dialing = *dialing_;
    MutexLock lock(dialing.mutex);
    if (closed_ || dialing.thread != nullptr || !start_dialer(dialing)) return;
    dialing.wanted = true;
    dialing.wake.notify_all();
}

// With io_mutex_ held: a connection, or why there is none. Only the first call waits for it.
Status DirectoryClient::ready() {
    if (keeps_way()) return success();
    Dialing& dialing = *dialing_;
    MutexLock lock(dialing.mutex);
    if (closed_) return Error{Code::kClosed, "the directory's client was closed"};
    connected_ = false;  // where it is changed for one to the own node, too
    socket_ = {};
    live_fd_ = -1;
    if (Status status = start_dialer(dialing); !status) return status;
    // Set by lost() as well. Here it starts the very first dial.
    if (!dialing.socket.fd.valid() && !dialing.wanted) {
        dialing.wanted = true;
        dialing.wake.notify_all();
    }
    if (!dialing.once) {
        auto since = Clock::now();
        auto most = std::chrono::milliseconds(std::max(WaitBudget::within(2 * options_.timeout_ms), 0));
        dialing.done.wait_for(lock, most, [&]() REQUIRES(dialing.mutex) { return closed_ || dialing.once; });
        if (!dialing.socket.fd.valid()) WaitBudget::spent_since(since);
    }
    if (closed_) return Error{Code::kClosed, "the directory's client was closed"};
    if (!dialing.socket.fd.valid()) {
        if (!dialing.why_not.text.empty()) return dialing.why_not;
        return Error{Code::kUnavailable, "there is no connection to the master at " + options_.master};
    }
    socket_ = std::move(dialing.socket);
    live_fd_ = socket_.fd.get();
    left_ = false;
    by_node_ = dialing.by_node.has_value();
    file_.reset();
    life_ = 0;
    if (by_node_ && dialing.by_node->life != 0 && dialing.by_node->members.valid()) {
        Result<MembersReader> file = MembersReader::open(dialing.by_node->members);
        if (file) file_ = std::move(*file);
        life_ = dialing.by_node->life;
    }
    dialing.by_node.reset();
    back_at_ms_ = now_ms() + static_cast<uint64_t>(options_.back_to_node_ms);
    dialing.why_not =
        Error{Code::kUnavailable, "the connection to the master at " + options_.master + " is lost"};
    members_.connected();
    connected_ = true;
    return success();
}

// Called for every failure behind the connect. The wait that ended for nothing is charged to the caller's
// budget, and the dialer begins at once, so that the next call may find a connection.
Error DirectoryClient::lost(Error error) {
    if (error.code == Code::kTimeout) WaitBudget::spent(waits_ms_);
    connected_ = false;
    MutexLock lock(dialing_->mutex);
    if (!closed_) {
        dialing_->wanted = true;
        dialing_->only_node = false;
        dialing_->wake.notify_all();
    }
    return error;
}

// The other end of the connection is silent, or gone. Where the own node relays that is its failure: the same
// call asks the master itself then. A master that is gone may have a successor, which is asked then.
Error DirectoryClient::peer_failed(Error error) {
    const bool by_node = by_node_;
    const bool silent = error.code == Code::kTimeout;
    error = lost(std::move(error));
    if (!by_node && silent) return error;
    // A caller that had hardly any time left does not know that the node is silent.
    constexpr int kWaitMin = 100;
    if (silent && waits_ms_ > kWaitMin)
        no_node_until_ms_ = now_ms() + static_cast<uint64_t>(options_.back_to_node_ms);
    again_ = true;
    dial_at_once();
    return error;
}

std::string DirectoryClient::peer() const {
    return by_node_ ? "the node at " + options_.relay.name : "the master at " + options_.master;
}

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

Status DirectoryClient::send_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        ssize_t n = socket_.send(bytes.data(), bytes.size(), true);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            return peer_failed({Code::kTimeout, peer() + " took no bytes in time"});
        }
        if (n < 0) {
            return peer_failed(
                {Code::kUnavailable, "the connection to " + peer() + " is lost: " + std::strerror(errno)});
        }
        bytes = bytes.subspan(static_cast<size_t>(n));
    }
    return success();
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
    if (Status status = receive(&header, sizeof(header)); !status) return status;
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
    if (header.kind == Kind::kError) {
        Error error = read_error(body);
        if (error.code == Code::kUnavailable) return peer_failed(std::move(error));
        return lost(std::move(error));
    }
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
