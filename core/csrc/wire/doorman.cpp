#include "wire/doorman.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

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

Result<std::unique_ptr<Doorman>> Doorman::create(DoormanOptions options) {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "a listening port needs a cluster token"};
    std::unique_ptr<Doorman> doorman(new Doorman(std::move(options)));
    for (const std::string& text : doorman->options_.addresses) {
        Result<std::vector<SocketAddress>> addresses = resolve(text, true);
        if (!addresses) return addresses.error();
        Result<Fd> listener = Error{Code::kUnavailable, text + " has no address"};
        for (const SocketAddress& address : *addresses) {
            listener = listen_tcp(address, text);
            if (listener) break;
        }
        if (!listener) return listener.error();
        doorman->addresses_.push_back(local_address(listener->get()));
        doorman->listeners_.push_back(std::make_shared<Listener>(*doorman, std::move(*listener)));
    }
    return doorman;
}

Doorman::~Doorman() { stop(); }

void Doorman::offer(std::string purpose, Purpose handler) {
    purposes_.insert_or_assign(std::move(purpose), std::move(handler));
}

Status Doorman::start() {
    if (running_) return success();
    if (loop_ != nullptr) return Error{Code::kClosed, "this port was closed"};
    spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    EventLoopOptions options;
    options.name = "mp-doorman";
    options.tick_ms = kTickMs;
    options.on_tick = [this](uint64_t now) { drop_late(now); };
    options.idle = [this] { return strangers_.empty(); };
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(options));
    if (!loop) return loop.error();
    for (const auto& listener : listeners_) {
        if (!(*loop)->add(listener->fd.get(), EPOLLIN, listener)) return os_error("epoll");
    }
    loop_ = std::move(*loop);
    Status started = loop_->start();
    running_ = started.ok();
    return started;
}

void Doorman::stop() {
    if (!running_.exchange(false) || !loop_->stop()) return;
    strangers_.clear();
    listeners_.clear();
}

bool Doorman::is_alive(Pulse::Clock::time_point deadline) { return running_ && loop_->is_alive(deadline); }

void Doorman::accept_all(int listener) {
    for (int round = 0; round < 64; ++round) {  // then it is the turn of the connections already in
        Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) {
            if (errno == EINTR || errno == ECONNABORTED) continue;
            if (errno == EMFILE || errno == ENFILE) {
                // Out of descriptors: give up the spare one to tell the peer, rather than spin.
                spare_.reset();
                Fd refused(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
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

void Doorman::greet(Fd fd) {
    if (strangers_.size() >= options_.limits.connections_unproved) {
        auto oldest = std::ranges::min_element(strangers_, {},
                                               [](const auto& entry) { return entry.second->since_ms; });
        counters_.refused_total.fetch_add(1);
        note(Level::kWarning, "crowded_out", *oldest->second,
             "made room before its handshake was done: too many callers are in theirs");
        forget(*oldest->second);
    }
    (void)prepare_socket(fd.get());
    auto stranger = std::make_shared<Stranger>(*this);
    stranger->nonce = random_nonce();
    stranger->peer = peer_address(fd.get());
    stranger->since_ms = now_ms();
    stranger->fd = std::move(fd);
    if (options_.tls != nullptr) {
        Result<std::unique_ptr<TlsStream>> tls = options_.tls->open();
        if (!tls) return;
        stranger->tls = std::move(*tls);
    } else if (!challenge(*stranger)) {
        return;
    }
    counters_.accepted_total.fetch_add(1);
    stranger->key = stranger->fd.get();
    if (!loop_->add(stranger->key, EPOLLIN, stranger)) return;
    strangers_.emplace(stranger->key, std::move(stranger));
}

// False: it is over with this stranger.
bool Doorman::serve(Stranger& stranger) {
    if (on_event(stranger)) return true;
    forget(stranger);
    return false;
}

void Doorman::forget(const Stranger& stranger) {
    int key = stranger.key;  // the stranger may end with the next line
    std::shared_ptr<EventHandler> last = loop_->remove(key);
    strangers_.erase(key);
}

bool Doorman::challenge(Stranger& stranger) {
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kChallenge, 0, 0);
    Writer w(frame);
    w.bytes(stranger.nonce.data(), stranger.nonce.size());
    w.bytes(options_.incarnation.data(), options_.incarnation.size());
    finish_frame(frame, at);
    stranger.challenged = true;
    return send_now(stranger.fd.get(), stranger.tls.get(), frame);
}

bool Doorman::on_event(Stranger& stranger) {
    if (stranger.tls == nullptr) return on_readable(stranger);
    if (!stranger.challenged && !secure(stranger)) return false;
    if (!stranger.tls->flush(stranger.fd.get()) && errno != EAGAIN) return false;
    if (stranger.challenged && !on_readable(stranger)) return false;
    bool waits = stranger.tls->unsent();
    if (std::exchange(stranger.waits_for_room, waits) == waits) return true;
    loop_->watch(stranger.key, EPOLLIN | (waits ? EPOLLOUT : 0u));
    return true;
}

// The handshake of TLS, as far as it goes now, and behind it our challenge.
bool Doorman::secure(Stranger& stranger) {
    TlsStream::Step step = stranger.tls->handshake(stranger.fd.get());
    if (step == TlsStream::Step::kWait) return true;
    if (step == TlsStream::Step::kDone) return challenge(stranger);
    if (stranger.tls->not_tls()) return refuse_plain(stranger);
    bool untrusted = stranger.tls->untrusted();
    (untrusted ? counters_.auth_failures_total : counters_.protocol_errors_total).fetch_add(1);
    note(Level::kWarning, untrusted ? "auth_refused" : "protocol_refused", stranger,
         untrusted ? "its certificate is not trusted" : "its TLS handshake failed");
    return hang_up(stranger);
}

bool Doorman::on_readable(Stranger& stranger) {
    // Only the header until it is known how long AUTH is, and never a byte behind it: those are not ours.
    for (;;) {
        size_t want = sizeof(FrameHeader);
        FrameHeader header;
        if (stranger.in.size() >= sizeof(header)) {
            std::memcpy(&header, stranger.in.data(), sizeof(header));
            if (stranger.in[0] == std::byte{kTlsHandshake}) {
                return refuse(stranger, Code::kProtocol, "the caller speaks TLS, and this port does not");
            }
            if (header.magic != kMagic) {
                return refuse(stranger, Code::kProtocol, "a frame does not start with the magic number");
            }
            if (header.version != kVersion) {
                return refuse(stranger, Code::kProtocol,
                              "this process speaks version " + std::to_string(kVersion) +
                                  " of the wire format, the caller " + std::to_string(header.version) +
                                  "; run adjacent releases");
            }
            if (header.kind != Kind::kAuth) {
                return refuse(stranger, Code::kProtocol, "a frame came before the handshake");
            }
            if (header.length > options_.limits.handshake_bytes) {
                return refuse(stranger, Code::kTooLarge,
                              "a handshake of " + std::to_string(header.length) + " bytes is over the limit");
            }
            want = sizeof(header) + header.length;
            if (stranger.in.size() == want) {
                std::span<const std::byte> body(stranger.in);
                return on_auth(stranger, header, Reader(body.subspan(sizeof(header))));
            }
        }
        size_t have = stranger.in.size();
        stranger.in.resize(want);
        ssize_t n;
        do {
            n = stranger.tls != nullptr
                    ? stranger.tls->receive(stranger.fd.get(), stranger.in.data() + have, want - have)
                    : ::recv(stranger.fd.get(), stranger.in.data() + have, want - have, 0);
        } while (n < 0 && errno == EINTR);
        stranger.in.resize(have + static_cast<size_t>(std::max<ssize_t>(n, 0)));
        if (n == 0) return false;
        if (n < 0) return errno == EAGAIN;
    }
}

bool Doorman::on_auth(Stranger& stranger, const FrameHeader& header, Reader body) {
    std::string tenant(body.text16());
    std::string_view client_nonce_bytes = body.bytes(sizeof(Nonce));
    std::string_view mac = body.bytes(sizeof(Mac));
    std::string purpose(body.text16());
    if (!body.done()) return refuse(stranger, Code::kProtocol, "a frame is no AUTH of a TCP connection");
    Nonce client_nonce;
    std::memcpy(client_nonce.data(), client_nonce_bytes.data(), client_nonce.size());
    std::string covered = mac_tenant(tenant, purpose);
    Mac expected = handshake_mac(Role::kClient, options_.token, stranger.nonce, client_nonce,
                                 options_.incarnation, covered);
    if (!equal_constant_time(expected, std::span(reinterpret_cast<const uint8_t*>(mac.data()), mac.size()))) {
        return refuse(stranger, Code::kAuth,
                      "the cluster token is wrong; give all processes of the cluster the same token file");
    }
    auto it = purposes_.find(purpose);
    if (it == purposes_.end()) {
        return refuse(stranger, Code::kAuth, "nothing behind this port serves \"" + purpose + "\"");
    }
    Result<std::vector<std::byte>> welcome = it->second.welcome(tenant);
    if (!welcome) return refuse(stranger, welcome.error().code, welcome.error().text);
    Mac proof = handshake_mac(Role::kNode, options_.token, stranger.nonce, client_nonce, options_.incarnation,
                              covered);
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kWelcome, kFlagAnswer, header.request_id);
    Writer w(frame);
    w.bytes(proof.data(), proof.size());
    w.bytes(welcome->data(), welcome->size());
    finish_frame(frame, at);
    if (!send_now(stranger.fd.get(), stranger.tls.get(), frame)) return false;
    loop_->remove(stranger.key);  // before another thread has the socket
    it->second.serve(
        Caller{std::move(stranger.fd), std::move(tenant), std::move(stranger.peer), std::move(stranger.tls)});
    return false;
}

bool Doorman::refuse(Stranger& stranger, Code code, const std::string& text) {
    bool is_auth = code == Code::kAuth;
    (is_auth ? counters_.auth_failures_total : counters_.protocol_errors_total).fetch_add(1);
    note(Level::kWarning, is_auth ? "auth_refused" : "protocol_refused", stranger, text);
    send_error(stranger.fd.get(), code, text, stranger.tls.get());
    return hang_up(stranger);
}

void Doorman::note(Level level, const char* kind, const Stranger& stranger, const std::string& text) {
    if (options_.journal != nullptr) options_.journal->note(level, kind, stranger.peer, text);
}

bool Doorman::refuse_plain(Stranger& stranger) {
    stranger.tls.reset();
    return refuse(stranger, Code::kProtocol,
                  "this port speaks TLS only; set cluster.tls_control, and cluster.tls_ca to the authorities "
                  "that vouch for it");
}

// What was said last still has to arrive.
bool Doorman::hang_up(Stranger& stranger) {
    // Bytes left unread would turn the close into a reset, which could overtake the reason; but no
    // more than so many, for the others wait meanwhile.
    constexpr int kRoundsMax = 16;
    std::byte nothing[4096];
    for (int round = 0; round < kRoundsMax; ++round) {
        if (::recv(stranger.fd.get(), nothing, sizeof(nothing), MSG_DONTWAIT) <= 0) break;
    }
    ::shutdown(stranger.fd.get(), SHUT_WR);
    return false;
}

void Doorman::drop_late(uint64_t now) {
    std::vector<std::shared_ptr<Stranger>> all;
    for (const auto& [key, stranger] : strangers_) all.push_back(stranger);
    for (const auto& stranger : all) {
        if (is_late(*stranger, now)) forget(*stranger);
    }
}

bool Doorman::is_late(Stranger& stranger, uint64_t now) {
    uint64_t waited_ms = now - stranger.since_ms;
    if (stranger.tls != nullptr && !stranger.tls->heard() && waited_ms > kTlsSilenceMs &&
        !has_spoken(stranger.fd.get())) {
        return !refuse_plain(stranger);
    }
    if (waited_ms <= options_.limits.handshake_ms) return false;
    counters_.handshake_timeouts_total.fetch_add(1);
    note(Level::kInfo, "handshake_timeout", stranger, "the handshake took too long");
    if (stranger.tls != nullptr && !stranger.challenged) return true;  // there is no way to tell it
    send_error(stranger.fd.get(), Code::kTimeout,
               "the handshake took over " + std::to_string(options_.limits.handshake_ms) + " ms",
               stranger.tls.get());
    return true;
}

}  // namespace moonpool
