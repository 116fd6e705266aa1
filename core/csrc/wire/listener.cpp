// A connection's way:
//
//   accepted --(TLS handshake)--> challenged --AUTH--> checked --WELCOME--> its service's socket
//       \_____________ refused, late, or crowded out: ERROR, and the end ______/
//
// Cost of a plain one: accept, one send for the challenge, two receives for AUTH (its header says how long it
// is; no byte behind it is read, as that is the service's), two HMACs, one send for WELCOME.
//
// The thread "mp-listener" owns pending_ and the sockets. services_ is filled before start() and only read
// afterwards. A connection leaves pending_ in one of two ways: forget() closes it, or on_auth() moves its
// socket out and gives it to the service.
#include "wire/listener.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/hmac.hpp"
#include "wire/address.hpp"
#include "wire/frame.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kTickMs = 100;
// A caller that does not speak TLS waits for our challenge; one that does, speaks at once. Less than any
// caller's time for a handshake, so that the reason still comes.
constexpr uint64_t kTlsSilenceMs = 250;

// To a socket that has sent nothing yet or little: it fits, or the peer is of no interest.
bool send_now(int fd, TlsStream* tls, const std::vector<std::byte>& frame) {
    if (tls != nullptr)
        return tls->send(fd, frame.data(), frame.size()) == static_cast<ssize_t>(frame.size());
    return ::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(frame.size());
}

// What has come and was not read yet: this thread may have been kept from it.
bool has_spoken(int fd) {
    char first;
    return ::recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

}  // namespace

void send_error(int fd, Code code, const std::string& text, TlsStream* tls) {
    std::vector<std::byte> frame;
    write_error(frame, code, text, 0, 0);
    (void)send_now(fd, tls, frame);
}

Result<std::unique_ptr<Listener>> Listener::create(ListenerOptions options) {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "a listening port needs a cluster token"};
    std::unique_ptr<Listener> listener(new Listener(std::move(options)));
    std::vector<Fd>& given = listener->options_.sockets;
    if (!given.empty() && given.size() != listener->options_.addresses.size()) {
        return Error{Code::kProtocol, "the running node listens at another number of addresses"};
    }
    for (Fd& socket : given) {
        listener->addresses_.push_back(local_address(socket.get()));
        listener->sockets_.push_back(std::make_shared<ListenSocket>(*listener, std::move(socket)));
    }
    if (!given.empty()) return listener;
    for (const std::string& text : listener->options_.addresses) {
        Result<std::vector<SocketAddress>> addresses = resolve(text, true);
        if (!addresses) return addresses.error();
        // A name may have several addresses; the first that this host can listen on is taken.
        Result<Fd> socket = Error{Code::kUnavailable, text + " has no address"};
        for (const SocketAddress& address : *addresses) {
            socket = listen_tcp(address, text);
            if (socket) break;
        }
        if (!socket) return socket.error();
        listener->addresses_.push_back(local_address(socket->get()));
        listener->sockets_.push_back(std::make_shared<ListenSocket>(*listener, std::move(*socket)));
    }
    return listener;
}

Listener::~Listener() { stop(); }

void Listener::offer(std::string service, Service handler) {
    services_.insert_or_assign(std::move(service), std::move(handler));
}

Status Listener::start(bool paused) {
    if (running_) return success();
    if (loop_ != nullptr) return Error{Code::kClosed, "this port was closed"};
    spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    EventLoopOptions options;
    options.name = "mp-listener";
    options.tick_ms = kTickMs;
    options.on_tick = [this](uint64_t now) { drop_late(now); };
    options.idle = [this] { return pending_.empty(); };
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(options));
    if (!loop) return loop.error();
    for (const auto& socket : sockets_) {
        if (!paused && !(*loop)->add(socket->fd.get(), EPOLLIN, socket)) return os_error("epoll");
    }
    loop_ = std::move(*loop);
    Status started = loop_->start();
    running_ = started.ok();
    return started;
}

void Listener::stop() {
    if (!running_.exchange(false) || !loop_->stop()) return;
    pending_.clear();
    callers_.clear();
    sockets_.clear();
}

void Listener::pause(uint32_t timeout_ms) {
    if (!running_) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    auto busy = std::make_shared<std::atomic<bool>>(true);
    while (*busy && std::chrono::steady_clock::now() < end) {
        bool ran = loop_->call(
            [this, busy] {
                for (const auto& socket : sockets_) loop_->remove(socket->fd.get());
                *busy = !pending_.empty();
            },
            timeout_ms);
        if (!ran) return;
        if (*busy) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void Listener::resume() {
    if (!running_) return;
    loop_->post([this] {
        for (const auto& socket : sockets_) (void)loop_->add(socket->fd.get(), EPOLLIN, socket);
    });
}

std::vector<int> Listener::sockets() const {
    std::vector<int> numbers;
    for (const auto& socket : sockets_) numbers.push_back(socket->fd.get());
    return numbers;
}

bool Listener::is_alive(LivenessProbe::Clock::time_point deadline) {
    return running_ && loop_->is_alive(deadline);
}

void Listener::accept_all(int socket) {
    for (int round = 0; round < 64; ++round) {  // then it is the turn of the connections already in
        Fd fd(::accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) {
            if (errno == EINTR || errno == ECONNABORTED) continue;
            if (errno == EMFILE || errno == ENFILE) {
                // Out of descriptors: give up the spare one to tell the peer, rather than spin.
                spare_.reset();
                Fd refused(::accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
                if (refused.valid()) {
                    send_error(refused.get(), Code::kTooLarge, "this process is out of file descriptors");
                }
                counters_.refused_total.fetch_add(1);
                refused.reset();
                spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
            }
            return;
        }
        greet(std::move(fd));
    }
}

// Linear in pending_, which is bounded by connections_unproved. A connection that fails here closes with
// `fd` or `pending`.
void Listener::greet(Fd fd) {
    if (pending_.size() >= options_.limits.connections_unproved) make_room();
    (void)prepare_socket(fd.get());
    auto pending = std::make_shared<PendingConnection>(*this);
    pending->nonce = random_nonce();
    pending->peer = peer_address(fd.get());
    pending->since_ms = now_ms();
    pending->fd = std::move(fd);
    if (options_.tls != nullptr) {
        Result<std::unique_ptr<TlsStream>> tls = options_.tls->open();
        if (std::string why = options_.tls->take_trouble(); !why.empty()) {
            note(Level::kError, "tls_files", *pending, why);
        }
        if (!tls) return;
        pending->tls = std::move(*tls);
        // Without TLS the listener speaks first. With TLS the caller does, and the challenge follows the TLS
        // handshake.
    } else if (!challenge(*pending)) {
        return;
    }
    counters_.accepted_total.fetch_add(1);
    pending->key = pending->fd.get();
    if (!loop_->add(pending->key, EPOLLIN, pending)) return;
    pending->caller = callers_.try_emplace(peer_network(pending->key)).first;
    ++pending->caller->second;
    pending_.emplace(pending->key, std::move(pending));
}

// Of the address that has the most places the connection that waits longest goes.
void Listener::make_room() {
    auto rank = [](const auto& entry) {
        return std::pair(entry.second->caller->second, ~entry.second->since_ms);
    };
    const PendingConnection& last = *std::ranges::max_element(pending_, {}, rank)->second;
    counters_.refused_total.fetch_add(1);
    note(Level::kWarning, "crowded_out", last,
         "made room before its handshake was done: too many callers are in theirs");
    forget(last);
}

// False: it is over with this connection.
bool Listener::serve(PendingConnection& pending) {
    if (on_event(pending)) return true;
    forget(pending);
    return false;
}

void Listener::forget(const PendingConnection& pending) {
    int key = pending.key;  // the connection may end with the next line
    // Keeps the handler until the end of this function: `pending` is a part of it.
    std::shared_ptr<EventHandler> last = loop_->remove(key);
    if (--pending.caller->second == 0) callers_.erase(pending.caller);
    pending_.erase(key);
}

bool Listener::challenge(PendingConnection& pending) {
    std::vector<std::byte> frame;
    size_t at = begin_handshake_frame(frame, Kind::kChallenge, 0, options_.versions);
    Writer w(frame);
    w.bytes(pending.nonce.data(), pending.nonce.size());
    w.bytes(options_.incarnation.data(), options_.incarnation.size());
    finish_frame(frame, at);
    pending.challenged = true;
    return send_now(pending.fd.get(), pending.tls.get(), frame);
}

// One event may carry several steps: the rest of the TLS handshake, our challenge, and the caller's AUTH in
// the same bytes.
bool Listener::on_event(PendingConnection& pending) {
    if (pending.tls == nullptr) return on_readable(pending);
    if (!pending.challenged && !secure(pending)) return false;
    // What TLS produced and the socket did not take goes with the next event (EPOLLOUT).
    if (!pending.tls->flush(pending.fd.get()) && errno != EAGAIN) return false;
    if (pending.challenged && !on_readable(pending)) return false;
    bool waits = pending.tls->unsent();
    if (std::exchange(pending.waits_for_room, waits) == waits) return true;
    loop_->watch(pending.key, EPOLLIN | (waits ? EPOLLOUT : 0u));
    return true;
}

// The handshake of TLS, as far as it goes now, and behind it our challenge.
bool Listener::secure(PendingConnection& pending) {
    TlsStream::Step step = pending.tls->handshake(pending.fd.get());
    if (step == TlsStream::Step::kWait) return true;
    if (step == TlsStream::Step::kDone) return challenge(pending);
    if (pending.tls->not_tls()) return refuse_plain(pending);
    bool untrusted = pending.tls->untrusted();
    (untrusted ? counters_.auth_failures_total : counters_.protocol_errors_total).fetch_add(1);
    note(Level::kWarning, untrusted ? "auth_refused" : "protocol_refused", pending,
         untrusted ? "its certificate is not trusted" : "its TLS handshake failed");
    return hang_up(pending);
}

bool Listener::on_readable(PendingConnection& pending) {
    // Only the header until it is known how long AUTH is, and never a byte behind it: those are not ours.
    for (;;) {
        size_t want = sizeof(FrameHeader);
        FrameHeader header;
        if (pending.in.size() >= sizeof(header)) {
            std::memcpy(&header, pending.in.data(), sizeof(header));
            // The first byte of a TLS hello, which no frame begins with: a caller with TLS at a port
            // without it gets the reason in plain.
            if (pending.in[0] == std::byte{kTlsHandshake}) {
                return refuse(pending, Code::kProtocol, "the caller speaks TLS, and this port does not");
            }
            if (header.magic != kMagic) {
                return refuse(pending, Code::kProtocol, "a frame does not start with the magic number");
            }
            if (header.kind != Kind::kAuth) {
                return refuse(pending, Code::kProtocol, "a frame came before the handshake");
            }
            if (Result<uint16_t> version = agree_on_auth(header, own()); !version) {
                return refuse(pending, version.error().code, version.error().text);
            }
            if (header.length > options_.limits.handshake_bytes) {
                return refuse(pending, Code::kTooLarge,
                              "a handshake of " + std::to_string(header.length) + " bytes is over the limit");
            }
            want = sizeof(header) + header.length;
            if (pending.in.size() == want) {
                std::span<const std::byte> body(pending.in);
                return on_auth(pending, header, Reader(body.subspan(sizeof(header))));
            }
        }
        size_t have = pending.in.size();
        pending.in.resize(want);
        ssize_t n;
        do {
            n = pending.tls != nullptr
                    ? pending.tls->receive(pending.fd.get(), pending.in.data() + have, want - have)
                    : ::recv(pending.fd.get(), pending.in.data() + have, want - have, 0);
        } while (n < 0 && errno == EINTR);
        pending.in.resize(have + static_cast<size_t>(std::max<ssize_t>(n, 0)));
        if (n == 0) return false;
        if (n < 0) return errno == EAGAIN;
    }
}

bool Listener::on_auth(PendingConnection& pending, const FrameHeader& header, Reader body) {
    std::string tenant(body.text16());
    std::string_view client_nonce_bytes = body.bytes(sizeof(Nonce));
    std::string_view mac = body.bytes(sizeof(Mac));
    std::string service(body.text16());
    if (!body.done()) return refuse(pending, Code::kProtocol, "a frame is no AUTH of a TCP connection");
    Nonce client_nonce;
    std::memcpy(client_nonce.data(), client_nonce_bytes.data(), client_nonce.size());
    std::string covered = mac_tenant(tenant, service);
    std::optional<Proved> proved =
        prove_access(mac, options_.token, options_.tenants.get(), pending.nonce, client_nonce,
                     options_.incarnation, tenant, covered, header.version);
    if (std::string why = options_.token.take_trouble(); !why.empty()) {
        note(Level::kWarning, "token", pending, why);
    }
    if (!proved) {
        NotProved refusal = not_proved(options_.tenants.get(), tenant,
                                       "give all processes of the cluster the same token file");
        return refuse(pending, Code::kAuth, refusal.text, refusal.noted);
    }
    auto it = services_.find(service);
    if (it == services_.end()) {
        return refuse(pending, Code::kAuth, "nothing behind this port serves \"" + service + "\"");
    }
    const Access& access = proved->access;
    if (!access.is_cluster && it->second.welcome_tenant == nullptr) {
        return refuse(
            pending, Code::kAuth,
            "a tenant's key does not open the service \"" + service + "\", which needs the cluster token");
    }
    Result<std::vector<std::byte>> welcome =
        access.is_cluster ? it->second.welcome(tenant) : it->second.welcome_tenant(tenant, access);
    if (!welcome) {
        const bool unavailable = welcome.error().code == Code::kUnavailable;
        const std::string instead = unavailable && it->second.instead ? it->second.instead() : "";
        std::vector<std::byte> behind;
        if (!instead.empty()) {
            const Mac mac =
                handshake_mac(Role::kNode, proved->secret, pending.nonce, client_nonce, options_.incarnation,
                              mac_instead(covered, instead), header.version);
            Writer w(behind);
            w.text16(instead);
            w.bytes(mac.data(), mac.size());
        }
        return refuse(pending, welcome.error().code, welcome.error().text, "", behind);
    }
    Mac proof = handshake_mac(Role::kNode, proved->secret, pending.nonce, client_nonce, options_.incarnation,
                              covered, header.version);
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kWelcome, kFlagAnswer, header.request_id);
    Writer w(frame);
    w.bytes(proof.data(), proof.size());
    w.bytes(welcome->data(), welcome->size());
    finish_frame(frame, at);
    if (!send_now(pending.fd.get(), pending.tls.get(), frame)) return false;
    loop_->remove(pending.key);  // before another thread has the socket
    it->second.serve(AuthenticatedConnection{std::move(pending.fd), std::move(tenant),
                                             std::move(pending.peer), std::move(pending.tls), access,
                                             header.version});
    return false;
}

// The reason is counted, noted for the operator with the peer's address, and sent to the caller, who may be
// a misconfigured process of this cluster.
bool Listener::refuse(PendingConnection& pending, Code code, const std::string& text,
                      const std::string& noted, std::span<const std::byte> behind) {
    bool is_auth = code == Code::kAuth;
    (is_auth ? counters_.auth_failures_total : counters_.protocol_errors_total).fetch_add(1);
    note(Level::kWarning, is_auth ? "auth_refused" : "protocol_refused", pending,
         noted.empty() ? text : noted);
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kError, 0, 0);
    Writer w(frame);
    write_error_body(w, code, text);
    w.bytes(behind.data(), behind.size());
    finish_frame(frame, at);
    (void)send_now(pending.fd.get(), pending.tls.get(), frame);
    return hang_up(pending);
}

void Listener::note(Level level, const char* kind, const PendingConnection& pending,
                    const std::string& text) {
    if (options_.journal != nullptr) options_.journal->note(level, kind, pending.peer, text);
}

bool Listener::refuse_plain(PendingConnection& pending) {
    const std::string setting = pending.tls->use().setting;
    pending.tls.reset();
    return refuse(pending, Code::kProtocol,
                  "this port speaks TLS only; set " + setting +
                      ", and cluster.tls_ca to the authorities that vouch for it");
}

// What was said last still has to arrive.
bool Listener::hang_up(PendingConnection& pending) {
    // Bytes left unread would turn the close into a reset, which could overtake the reason; but no
    // more than so many, for the others wait meanwhile.
    constexpr int kRoundsMax = 16;
    std::byte nothing[4096];
    for (int round = 0; round < kRoundsMax; ++round) {
        if (::recv(pending.fd.get(), nothing, sizeof(nothing), MSG_DONTWAIT) <= 0) break;
    }
    ::shutdown(pending.fd.get(), SHUT_WR);
    return false;
}

// On a copy of the list: forget() changes pending_.
void Listener::drop_late(uint64_t now) {
    std::vector<std::shared_ptr<PendingConnection>> all;
    for (const auto& [key, pending] : pending_) all.push_back(pending);
    for (const auto& pending : all) {
        if (is_late(*pending, now)) forget(*pending);
    }
}

bool Listener::is_late(PendingConnection& pending, uint64_t now) {
    uint64_t waited_ms = now - pending.since_ms;
    if (pending.tls != nullptr && !pending.tls->heard() && waited_ms > kTlsSilenceMs &&
        !has_spoken(pending.fd.get())) {
        return !refuse_plain(pending);
    }
    if (waited_ms <= options_.limits.handshake_ms) return false;
    counters_.handshake_timeouts_total.fetch_add(1);
    note(Level::kInfo, "handshake_timeout", pending, "the handshake took too long");
    if (pending.tls != nullptr && !pending.challenged) return true;  // there is no way to tell it
    send_error(pending.fd.get(), Code::kTimeout,
               "the handshake took over " + std::to_string(options_.limits.handshake_ms) + " ms",
               pending.tls.get());
    return true;
}

}  // namespace moonpool
