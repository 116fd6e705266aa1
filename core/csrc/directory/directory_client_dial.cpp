// How a DirectoryClient gets its connection: the thread "mp-dial" asks the own node, which relays, or the
// masters, one after the other, and leaves the socket in Dialing. The next caller takes it from there
// (ready); directory_client.cpp has the states, the order of locks and the calls.
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/clock.hpp"
#include "base/wait_budget.hpp"
#include "directory/directory_client.hpp"
#include "wire/address.hpp"

namespace moonpool {

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
        Result<Dialed> to_one = dial_any(only_node, by_node);
        Result<ControlSocket> dialed = ask_for_masters(std::move(to_one), by_node.has_value());
        lock.lock();
        dialing.once = true;
        if (dialed) {
            dialing.socket = std::move(*dialed);
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
            const uint16_t version = dialed->version;
            if (to.versions.holds(version)) {
                by_node.emplace().life = welcome.number<uint64_t>();
                if (fds.size() == 1) by_node->members = std::move(fds.front());
            } else {
                dialed = none_in_common({"this process", to.versions}, {"the master", {version, version}},
                                        kWireFormat);
            }
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

// Behind a WELCOME that names masters: the other side tells of each change from then on. It comes between
// answers, also while no call is made; the next one reads it (has_ended, receive_answer).
Result<ControlSocket> DirectoryClient::ask_for_masters(Result<Dialed> dialed, bool by_node) {
    if (!dialed) return dialed.error();
    ControlSocket socket{std::move(dialed->fd), std::move(dialed->tls), options_.timeout_ms};
    std::span<const std::byte> list = dialed->welcome;
    if (by_node) list = list.subspan(std::min(list.size(), sizeof(uint64_t)));
    if (list.empty()) return socket;  // of the release before
    std::optional<MasterList> masters = masters_of(list);
    if (!masters) return socket;
    if (by_node) addresses_.hear_by_node(*masters);
    std::vector<std::byte> out;
    write_masters_question(out);
    ssize_t sent;
    do {
        sent = socket.send(out.data(), out.size(), true);
    } while (sent < 0 && errno == EINTR);
    if (sent != static_cast<ssize_t>(out.size()))
        return Error{Code::kUnavailable, "the connection to " + dialed->peer + " is lost"};
    return socket;
}

// A frame of which the header is read.
Status DirectoryClient::hear_masters(const FrameHeader& header) {
    constexpr uint32_t kBytesMax = 64u
                                   << 10;  // a later release may name more, in a list that says nothing here
    body_.resize(std::min(header.length, kBytesMax));
    if (header.length > kBytesMax) return lost({Code::kProtocol, peer() + " names too many masters"});
    if (Status status = receive(body_.data(), body_.size()); !status) return status;
    Reader body(body_);
    MasterList list;
    if (!list.read(body)) return success();
    if (by_node_) {
        addresses_.hear_by_node(list);
    } else {
        addresses_.hear(list);
    }
    return success();
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

}  // namespace moonpool
