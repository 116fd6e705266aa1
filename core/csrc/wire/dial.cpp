// The steps of dial(), each under one deadline for all: connect, TLS where it is set, the challenge with
// the other side's nonce and incarnation, AUTH with our nonce and proof, WELCOME with theirs. The caller's
// thread does it all and waits in poll(); `given_up` ends every wait early. The listener's half is
// listener.cpp.
//
// The proof covers both nonces, the incarnation, tenant and service: a recorded handshake cannot be
// replayed, and a proof for one service cannot be used for another. The other side's proof is checked
// before anything of its WELCOME is believed.
#include "wire/dial.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <span>

#include "base/hmac.hpp"
#include "wire/address.hpp"
#include "wire/limits.hpp"

namespace moonpool {

namespace {

// A WELCOME has some hundred bytes; later versions append to it.
constexpr uint32_t kWelcomeBytesMax = 64u << 10;

Error refused_by(const DialOptions& options, Reader& body) {
    if (options.refused != nullptr) *options.refused = true;
    Error error = read_error(body);
    error.text = options.address + ": " + error.text;
    return error;
}

// Behind code and text of a refusal: text16 address, 32 proof. None of it is believed without the proof, as
// the caller would show itself wherever it is told to.
void read_instead(const DialOptions& options, Reader& body,
                  const std::function<Mac(std::string_view)>& proof) {
    if (options.instead == nullptr || body.left() == 0) return;
    const std::string_view address = body.text16();
    const std::string_view given = body.bytes(sizeof(Mac));
    if (!body.ok()) return;
    const Mac expected = proof(address);
    const std::span bytes(reinterpret_cast<const uint8_t*>(given.data()), given.size());
    if (equal_constant_time(expected, bytes)) *options.instead = std::string(address);
}

class Handshake {
   public:
    Handshake(int fd, const DialOptions& options, TlsStream* tls)
        : fd_(fd),
          tls_(tls),
          peer_(options.address),
          own_{"this process", options.versions},
          end_(deadline_in(options.timeout_ms)),
          given_up_(options.given_up),
          fds_(options.fds) {}

    // The handshake of TLS itself.
    Status secure() {
        TlsStream::Step step;
        while ((step = tls_->handshake(fd_)) == TlsStream::Step::kWait) {
            auto events = static_cast<short>(POLLIN | (tls_->unsent() ? POLLOUT : 0));
            if (Status ready = wait(events); !ready) return ready;
        }
        if (step == TlsStream::Step::kDone) return success();
        return tls_->not_tls() ? answered_in_plain() : tls_->error(peer_);
    }

    // Returns when the socket has all of it: with TLS also what TLS has made of the bytes and still holds.
    Status send(const std::vector<std::byte>& bytes) {
        size_t sent = 0;
        while (sent < bytes.size() || (tls_ != nullptr && tls_->unsent())) {
            if (Status ready = wait(POLLOUT); !ready) return ready;
            ssize_t n = write(bytes.data() + sent, bytes.size() - sent);
            if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
            if (n < 0) return lost();
            sent += static_cast<size_t>(n);
        }
        return success();
    }

    Status receive(FrameHeader& header, std::vector<std::byte>& body, uint32_t bytes_max) {
        if (Status status = receive(&header, sizeof(header)); !status) return status;
        if (header.magic != kMagic) {
            return Error{Code::kProtocol, peer_ + " does not speak the protocol of Moonpool"};
        }
        if (header.version != kVersion) return other_version(header, own_, peer_);
        if (header.length > bytes_max) return Error{Code::kProtocol, peer_ + " sent a frame over the limit"};
        body.resize(header.length);
        return receive(body.data(), body.size());
    }

    // The version that both sides take, of a CHALLENGE. Where there is none the other side's answer would
    // tell the caller nothing new.
    Result<uint16_t> agree_on(const FrameHeader& challenge) {
        Result<uint16_t> version = agree(own_, {peer_, versions_of(challenge)}, kWireFormat);
        if (!version) (void)send(auth_without_version(own_.versions));
        return version;
    }

   private:
    Status receive(void* data, size_t size) {
        auto* at = static_cast<std::byte*>(data);
        while (size != 0) {
            // Text that TLS has decrypted already would not wake the poll.
            if (tls_ == nullptr || !tls_->pending()) {
                if (Status ready = wait(POLLIN); !ready) return ready;
            }
            ssize_t n = tls_ != nullptr ? tls_->receive(fd_, at, size) : receive_plain(at, size);
            if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
            if (n == 0) {
                return Error{Code::kUnavailable, peer_ + " closed the connection during the handshake"};
            }
            if (n < 0) return lost();
            at += n;
            size -= static_cast<size_t>(n);
        }
        return success();
    }
    // Descriptors ride on bytes: a plain recv would throw them away.
    ssize_t receive_plain(void* data, size_t size) {
        if (fds_ == nullptr) return ::recv(fd_, data, size, MSG_DONTWAIT);
        iovec part{data, size};
        alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        ssize_t n = ::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n <= 0) return n;
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; ++i) {
                int fd;
                std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
                fds_->emplace_back(fd);
            }
        }
        return n;
    }
    ssize_t write(const void* data, size_t size) {
        if (tls_ == nullptr) return ::send(fd_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (size == 0) return tls_->flush(fd_) ? 0 : -1;
        return tls_->send(fd_, data, size);
    }
    // To what was said inside TLS there came a frame.
    Error answered_in_plain() {
        // Nothing of the answer was read by TLS, so it can be read as a frame from its first byte.
        const std::string setting = tls_->use().setting;
        tls_ = nullptr;
        FrameHeader header;
        std::vector<std::byte> body;
        if (Status status = receive(header, body, Limits{}.handshake_bytes); !status) return status.error();
        if (header.kind == Kind::kError) {
            Reader reader(body);
            return Error{Code::kUnavailable,
                         peer_ + " gave up before it heard from here (" + read_error(reader).text + ")"};
        }
        return Error{Code::kProtocol, peer_ + " does not speak TLS, and this process must; set " + setting +
                                          " there, or set it to \"off\" here"};
    }
    // Every wait of the handshake is this one, so that the deadline and `given_up` hold for each.
    Status wait(short events) {
        Result<bool> ready = wait_for(fd_, events, end_, given_up_);
        if (!ready) return ready.error();
        if (*ready) return success();
        return Error{Code::kTimeout, peer_ + " did not finish the handshake in time"};
    }
    // EPROTO is the errno by which TlsStream says that TLS itself broke; it knows why.
    Error lost() const {
        if (tls_ != nullptr && errno == EPROTO) return tls_->error(peer_);
        return Error{Code::kUnavailable, "the connection to " + peer_ + " is lost: " + std::strerror(errno)};
    }

    int fd_;
    TlsStream* tls_;  // null: plain
    std::string peer_;
    Speaker own_;
    Deadline end_;  // of the whole handshake: a peer that sends a byte now and then gains nothing
    const std::atomic<bool>* given_up_;
    std::vector<Fd>* fds_;  // null: none are expected
};

}  // namespace

// The zero byte ends the tenant, so that the service cannot be read as a part of its name.
std::string mac_tenant(std::string_view tenant, std::string_view service) {
    std::string text(tenant);
    text.push_back('\0');
    text.append(service);
    return text;
}

std::string mac_instead(std::string_view covered, std::string_view address) {
    std::string text(covered);
    text.push_back('\0');
    text.append("instead ").append(address);
    return text;
}

// For the calls after the handshake, which block in send and receive.
void set_socket_timeouts(int fd, int timeout_ms) {
    timeval tv{timeout_ms / 1000, (timeout_ms % 1000) * 1000};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
}

namespace {

Result<Dialed> dial_with(const std::string& secret, const DialOptions& options) {
    Dialed dialed;
    if (options.tls != nullptr) {  // before connecting, so that no server waits for its hello
        Result<std::unique_ptr<TlsStream>> tls = options.tls->open(options.address);
        if (!tls) return tls.error();
        dialed.tls = std::move(*tls);
    }
    Result<Fd> fd = options.connect != nullptr ? options.connect()
                                               : connect_tcp(options.address, options.timeout_ms,
                                                             options.interface, options.given_up);
    if (!fd) return fd.error();
    dialed.fd = std::move(*fd);
    dialed.peer = options.address;
    set_socket_timeouts(dialed.fd.get(), options.timeout_ms);
    Handshake handshake(dialed.fd.get(), options, dialed.tls.get());
    if (dialed.tls != nullptr) {
        if (Status status = handshake.secure(); !status) return status.error();
    }

    FrameHeader header;
    std::vector<std::byte> body;
    if (Status status = handshake.receive(header, body, Limits{}.handshake_bytes); !status) {
        return status.error();
    }
    Reader challenge(body);
    // The port may be full, or the process out of descriptors: it says so instead of the challenge.
    if (header.kind == Kind::kError) return refused_by(options, challenge);
    Nonce node_nonce;
    std::string_view nonce = challenge.bytes(node_nonce.size());
    std::string_view incarnation = challenge.bytes(dialed.incarnation.size());
    if (header.kind != Kind::kChallenge || !challenge.done()) {
        return Error{Code::kProtocol, options.address + " does not speak the protocol of Moonpool"};
    }
    Result<uint16_t> version = handshake.agree_on(header);
    if (!version) return version.error();
    dialed.version = *version;
    // Only now: challenge.done() has vouched for the sizes.
    std::memcpy(node_nonce.data(), nonce.data(), nonce.size());
    std::memcpy(dialed.incarnation.data(), incarnation.data(), incarnation.size());

    Nonce client_nonce = random_nonce();
    std::string covered = mac_tenant(options.tenant, options.service);
    Mac mac = handshake_mac(Role::kClient, secret, node_nonce, client_nonce, dialed.incarnation, covered,
                            dialed.version);
    std::vector<std::byte> out;
    size_t at = begin_handshake_frame(out, Kind::kAuth, 1, options.versions, dialed.version);
    Writer w(out);
    w.text16(options.tenant);
    w.bytes(client_nonce.data(), client_nonce.size());
    w.bytes(mac.data(), mac.size());
    w.text16(options.service);
    finish_frame(out, at);
    if (Status status = handshake.send(out); !status) return status.error();

    if (Status status = handshake.receive(header, body, kWelcomeBytesMax); !status) return status.error();
    Reader welcome(body);
    if (header.kind == Kind::kError) {
        Error why = refused_by(options, welcome);
        read_instead(options, welcome, [&](std::string_view address) {
            return handshake_mac(Role::kNode, secret, node_nonce, client_nonce, dialed.incarnation,
                                 mac_instead(covered, address), dialed.version);
        });
        return why;
    }
    std::string_view proof = welcome.bytes(sizeof(Mac));
    if (header.kind != Kind::kWelcome || !welcome.ok()) {
        return Error{Code::kProtocol, options.address + " does not speak the protocol of Moonpool"};
    }
    Mac expected = handshake_mac(Role::kNode, secret, node_nonce, client_nonce, dialed.incarnation, covered,
                                 dialed.version);
    // Without this check any process that has the port could pose as the node and receive what clients
    // store.
    if (!equal_constant_time(expected,
                             std::span(reinterpret_cast<const uint8_t*>(proof.data()), proof.size()))) {
        return Error{Code::kAuth, options.address + " does not know the cluster token"};
    }
    // Of the own host's node, which relays: in which version its master takes what it passes on.
    if (options.connect != nullptr && header.lowest != 0) dialed.version = header.lowest;
    dialed.welcome.assign(body.begin() + static_cast<ptrdiff_t>(sizeof(Mac)), body.end());
    return dialed;
}

}  // namespace

// The other side may not have read its file again yet, or have done so before us: it is shown each secret.
Result<Dialed> dial(const DialOptions& options) {
    if (options.token.empty()) return Error{Code::kAuth, "a call needs a cluster token"};
    const auto secrets = options.token.now();
    const Deadline end = deadline_in(2 * options.timeout_ms);  // connecting, and then the handshake
    Result<Dialed> dialed = dial_with(secrets->front(), options);
    for (size_t i = 1; i < secrets->size() && !dialed && is_wrong_token(dialed.error()); ++i) {
        DialOptions again = options;
        again.timeout_ms = std::min(options.timeout_ms, left_ms(end) / 2);
        if (again.timeout_ms <= 0) break;
        if (options.refused != nullptr) *options.refused = false;
        if (options.fds != nullptr) options.fds->clear();
        dialed = dial_with((*secrets)[i], again);
    }
    return dialed;
}

}  // namespace moonpool
