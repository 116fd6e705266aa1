// The half of Session that begins it: finds the node, proves the cluster token to it and has its proof.
//
// Thread: the one that opens the session, alone until open() returns. Every wait ends at opening_->end,
// whatever arrives meanwhile (a node that sends a byte now and then gains no time), and when the caller's
// flag is set.
//
// A session is open once three things have happened, in this order: the path has connected it and both
// sides have proved the token; the arena and the index, where there are any, are mapped; the node knows
// the session's space. A failure before that leaves nothing behind: the descriptors close with the
// session.
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/hmac.hpp"
#include "store/client/session.hpp"
#include "wire/address.hpp"
#include "wire/congestion.hpp"
#include "wire/dial.hpp"

namespace moonpool {

namespace {

// The command that starts a node at this socket: node-NAME.sock is the name's, node.sock the first node's.
std::string node_command(std::string_view path) {
    std::string_view file = path.substr(path.rfind('/') + 1);
    std::string command = "moonpool node";
    if (file == "node.sock" || file == "node-default.sock") return command;
    if (!file.starts_with("node-") || !file.ends_with(".sock"))
        return command + " --socket " + std::string(path);
    return command + " --name " + std::string(file.substr(5, file.size() - 10));
}

}  // namespace

Result<Fd> connect_to_node(const ClientOptions& options, Deadline end, const std::atomic<bool>* given_up) {
    if (options.dial) return options.dial();
    const std::string& path = options.socket_path;
    // A longer path does not fit the address; cut off, it would name another socket.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        return Error{Code::kInvalidArgument,
                     "the socket path " + path + " is longer than a Unix socket allows"};
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    // A node that accepts no connection has a full queue at last; then connect() waits, a piece at a time.
    set_socket_timeouts(fd.get(), std::clamp(options.timeout_ms, 1, kLookMs));
    for (;;) {
        if (given_up != nullptr && given_up->load()) return Error{Code::kClosed, "given up meanwhile"};
        if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
        if (errno != EINTR && errno != EAGAIN) {
            if (errno == EACCES || errno == EPERM) {
                return Error{
                    Code::kUnavailable,
                    "the socket " + path + " belongs to another user (" + std::strerror(errno) +
                        "); run this as the user of the node, or set MOONPOOL_RUNTIME_DIR to a folder "
                        "of yours and start a node there with: moonpool node"};
            }
            return Error{Code::kUnavailable, "no node serves " + path + " (" + std::strerror(errno) +
                                                 "); start one with: " + node_command(path)};
        }
        if (std::chrono::steady_clock::now() >= end) {
            return Error{Code::kTimeout, "the node at " + path + " took no connection in time"};
        }
    }
}

Result<std::shared_ptr<Session>> Session::open(const ClientOptions& options,
                                               const std::atomic<bool>* given_up) {
    std::shared_ptr<Session> session(new Session());
    auto began = std::chrono::steady_clock::now();
    // Whether it is one of a pool it says in the handshake; one of another host is.
    // One of several peers of a call may take a part of its time only.
    bool remote = !options.address.empty();
    int most_ms =
        WaitBudget::within(remote ? WaitBudget::of_one_peer(options.timeout_ms) : options.timeout_ms);
    Status status = session->open_within(options, most_ms, given_up);
    if (!status && status.error().code == Code::kTimeout) WaitBudget::spent_since(began);
    if (!status) return status.error();
    return session;
}

Status Session::open_within(const ClientOptions& options, int most_ms, const std::atomic<bool>* given_up) {
    if (most_ms <= 0) return Error{Code::kTimeout, "others left no time of this call to connect"};
    const Deadline end = deadline_in(most_ms);
    {
        MutexLock lock(io_mutex_);
        opening_ = Opening{end, given_up};
    }
    Result<std::unique_ptr<BlockPath>> path = open_path(*this, options);
    if (!path) return path.error();
    path_ = std::move(*path);
    // What its former life held it may hold no more, or not yet: it may have to hear of removals first.
    if (options.incarnation && incarnation_ != *options.incarnation)
        return Error{Code::kUnavailable, "the node at " + peer_ + " was restarted"};
    {
        MutexLock lock(io_mutex_);
        timeout_ms_ = waits_ms_ = socket_ms_ = one_wait(options.timeout_ms);
        set_socket_timeouts(fd_.get(), timeout_ms_);
    }
    if (Status status = open_space(options); !status) return status;
    MutexLock lock(io_mutex_);
    opening_.reset();
    return success();
}

Status Session::connect_here(const ClientOptions& options, SharedMemory& memory) {
    MutexLock lock(io_mutex_);
    peer_ = options.dial ? "the embedded node" : options.socket_path;
    Status status = Error{Code::kAuth, "a client needs a cluster token"};
    if (options.token.empty()) return status;
    // While one secret replaces the other the node may know either alone.
    for (const std::string& secret : *options.token.now()) {
        Result<Fd> fd = connect_to_node(options, opening_->end, opening_->given_up);
        if (!fd) return fd.error();
        fd_ = std::move(*fd);
        status = handshake(secret, options, memory);
        if (status || !is_wrong_token(status.error())) break;
    }
    return status;
}

Status Session::connect_remote(const ClientOptions& options) {
    MutexLock lock(io_mutex_);
    DialOptions to{options.address,
                   options.token,
                   options.tenant,
                   std::string(kServiceStore),
                   std::max(1, left_ms(opening_->end)),
                   ""};
    to.given_up = opening_->given_up;
    to.versions = options.versions;
    to.tls = options.data_tls;
    Result<Dialed> dialed = moonpool::dial(to);
    if (!dialed) return dialed.error();
    fd_ = std::move(dialed->fd);
    tls_ = std::move(dialed->tls);
    // See docs/design.md, Bytes over TCP.
    leave_bbr_when_near(fd_.get());
    peer_ = options.address;
    incarnation_ = dialed->incarnation;
    Reader welcome(dialed->welcome);
    uint64_t arena_bytes = 0, index_bytes = 0;
    if (!read_welcome(welcome, arena_bytes, index_bytes)) {
        return Error{Code::kProtocol, options.address + " does not speak the protocol of a Moonpool node"};
    }
    return success();
}

Status Session::handshake(const std::string& secret, const ClientOptions& options, SharedMemory& memory) {
    const std::string& tenant = options.tenant;
    const VersionRange versions = options.versions;
    FrameHeader header;
    if (Status status = receive_frame(header, nullptr); !status) return status;
    Reader challenge(body_);
    if (header.kind == Kind::kError) return read_error(challenge);
    Nonce node_nonce;
    std::string_view nonce = challenge.bytes(node_nonce.size());
    std::string_view incarnation = challenge.bytes(incarnation_.size());
    if (header.kind != Kind::kChallenge || !challenge.done()) {
        return Error{Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool node"};
    }
    Result<uint16_t> version = agree({"this process", versions}, {peer_, versions_of(header)}, kWireFormat);
    if (!version) {
        out_ = auth_without_version(versions);
        (void)send_all(out_.data(), out_.size());
        return version.error();
    }
    std::memcpy(node_nonce.data(), nonce.data(), nonce.size());
    std::memcpy(incarnation_.data(), incarnation.data(), incarnation.size());

    // Ours goes into both proofs, so neither can be a recorded one. The roles in them differ: a node
    // cannot be made to answer for a client.
    Nonce client_nonce = random_nonce();
    Mac mac = handshake_mac(Role::kClient, secret, node_nonce, client_nonce, incarnation_, tenant, *version);
    out_.clear();
    size_t at = begin_handshake_frame(out_, Kind::kAuth, next_request_, versions, *version);
    Writer w(out_);
    w.text16(tenant);
    w.bytes(client_nonce.data(), client_nonce.size());
    w.bytes(mac.data(), mac.size());
    finish_frame(out_, at);
    if (Status status = send_all(out_.data(), out_.size()); !status) return status;

    std::vector<Fd> fds;
    if (Status status = receive_frame(header, &fds); !status) return status;
    Reader welcome(body_);
    if (header.kind == Kind::kError) return read_error(welcome);
    std::string_view proof = welcome.bytes(sizeof(Mac));
    if (header.kind != Kind::kWelcome || !read_welcome(welcome, memory.arena_bytes, memory.index_bytes) ||
        fds.size() != 2) {
        return Error{Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool node"};
    }
    // Until this holds the descriptors above are some process's, and nothing is mapped.
    Mac expected =
        handshake_mac(Role::kNode, secret, node_nonce, client_nonce, incarnation_, tenant, *version);
    if (!equal_constant_time(expected,
                             std::span(reinterpret_cast<const uint8_t*>(proof.data()), proof.size()))) {
        return Error{Code::kAuth,
                     peer_ + " does not know the cluster token: it is not the node that it claims to be"};
    }
    memory.arena = std::move(fds[0]);
    memory.index = std::move(fds[1]);
    return success();
}

bool Session::read_welcome(Reader& welcome, uint64_t& arena_bytes, uint64_t& index_bytes) {
    arena_bytes = arena_bytes_ = welcome.number<uint64_t>();
    index_bytes = welcome.number<uint64_t>();
    slab_bytes_ = welcome.number<uint64_t>();
    object_bytes_max_ = welcome.number<uint64_t>();
    key_bytes_max_ = welcome.number<uint32_t>();
    parts_max_ = welcome.number<uint32_t>();
    frame_bytes_max_ = welcome.number<uint32_t>();
    frame_keys_max_ = welcome.number<uint32_t>();
    if (!welcome.ok()) return false;
    if (welcome.left() == 0) return true;  // a node of the release before
    node_name_ = std::string(welcome.text16());
    host_id_ = std::string(welcome.text16());
    address_ = std::string(welcome.text16());
    master_ = std::string(welcome.text16());
    // Appended later than the others; what a node does not say it does not have.
    if (welcome.left() != 0) features_ = welcome.number<uint32_t>();
    if (welcome.left() != 0) master_timeout_ms_ = welcome.number<uint32_t>();
    if (welcome.left() != 0) salt_ = std::string(welcome.text16());
    return welcome.ok();
}

Status Session::open_space(const ClientOptions& options) {
    return call(
        Kind::kOpenSpace,
        [&](Writer& w) {
            w.text16(options.name_space);
            w.text16(options.fingerprint);
        },
        [&](Reader& r) {
            space_ = r.number<uint32_t>();
            return r.done();
        });
}

}  // namespace moonpool
