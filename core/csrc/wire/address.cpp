#include "wire/address.hpp"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>

namespace moonpool {

namespace {

constexpr int kKeepIdleSeconds = 5, kKeepIntervalSeconds = 2, kKeepCount = 3;
constexpr unsigned kUserTimeoutMs = 11000;

struct HostPort {
    std::string host, port;
};

Result<HostPort> split(const std::string& text) {
    Error bad{Code::kInvalidArgument, text + " is no address; write host:port, for example 10.0.0.7:7710"};
    // The system would cut it there, and take what is before for all of it.
    if (size_t nul = text.find('\0'); nul != std::string::npos) {
        bad.text = text.substr(0, nul) + "\\0... is no address: it has a NUL; write host:port";
        return bad;
    }
    size_t colon = text.rfind(':');
    if (colon == std::string::npos || colon == 0) return bad;
    HostPort out{text.substr(0, colon), text.substr(colon + 1)};
    if (out.host.front() == '[' && out.host.back() == ']') {
        out.host = out.host.substr(1, out.host.size() - 2);
    } else if (out.host.find(':') != std::string::npos) {
        return bad;
    }
    unsigned port = 0;
    const char* end = out.port.data() + out.port.size();
    auto [at, error] = std::from_chars(out.port.data(), end, port);
    if (error != std::errc() || at != end || port > 65535 || out.host.empty()) return bad;
    return out;
}

}  // namespace

Result<std::vector<SocketAddress>> resolve(const std::string& text, bool listening) {
    Result<HostPort> parts = split(text);
    if (!parts) return parts.error();
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (listening ? AI_PASSIVE : 0);
    addrinfo* list = nullptr;
    if (int failed = ::getaddrinfo(parts->host.c_str(), parts->port.c_str(), &hints, &list); failed != 0) {
        return Error{Code::kUnavailable, "the host of " + text + " is not known: " + ::gai_strerror(failed)};
    }
    std::vector<SocketAddress> found;
    for (addrinfo* a = list; a != nullptr; a = a->ai_next) {
        SocketAddress address;
        std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
        address.size = a->ai_addrlen;
        found.push_back(address);
    }
    ::freeaddrinfo(list);
    return found;
}

std::string host_of(const std::string& text) {
    Result<HostPort> parts = split(text);
    return parts ? parts->host : "";
}

std::vector<std::string> split_addresses(const std::string& list) {
    std::vector<std::string> addresses;
    for (size_t at = 0; at <= list.size();) {
        size_t end = std::min(list.find(',', at), list.size());
        if (end != at) addresses.push_back(list.substr(at, end - at));
        at = end + 1;
    }
    return addresses;
}

std::string to_text(const SocketAddress& address) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (::getnameinfo(address.get(), address.size, host, sizeof(host), port, sizeof(port),
                      NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "an unknown address";
    }
    bool v6 = address.family() == AF_INET6;
    return (v6 ? "[" : "") + std::string(host) + (v6 ? "]:" : ":") + port;
}

std::string local_address(int fd) {
    SocketAddress address;
    address.size = sizeof(address.storage);
    if (::getsockname(fd, address.get(), &address.size) != 0) return "an unknown address";
    return to_text(address);
}

std::string peer_address(int fd) {
    SocketAddress address;
    address.size = sizeof(address.storage);
    if (::getpeername(fd, address.get(), &address.size) != 0) return "an unknown address";
    return to_text(address);
}

std::string network_of(const SocketAddress& address) {
    if (address.family() == AF_INET) {
        const auto* v4 = reinterpret_cast<const sockaddr_in*>(address.get());
        return {reinterpret_cast<const char*>(&v4->sin_addr), sizeof(v4->sin_addr)};
    }
    if (address.family() != AF_INET6) return {};
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr;
    const char* bytes = reinterpret_cast<const char*>(v6.s6_addr);
    return IN6_IS_ADDR_V4MAPPED(&v6) ? std::string(bytes + 12, 4) : std::string(bytes, 8);
}

std::string peer_network(int fd) {
    SocketAddress address;
    address.size = sizeof(address.storage);
    return ::getpeername(fd, address.get(), &address.size) == 0 ? network_of(address) : std::string();
}

Status prepare_socket(int fd, const std::string& interface) {
    auto set = [fd](int level, int name, int value) {
        (void)::setsockopt(fd, level, name, &value, sizeof(value));
    };
    set(IPPROTO_TCP, TCP_NODELAY, 1);
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleSeconds);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalSeconds);
    set(IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
    if (!interface.empty() && ::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, interface.c_str(),
                                           static_cast<socklen_t>(interface.size() + 1)) != 0) {
        return os_error("binding to the interface " + interface);
    }
    return success();
}

Result<Fd> listen_tcp(const SocketAddress& address, const std::string& text) {
    Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    int one = 1;
    (void)::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (address.family() == AF_INET6)
        (void)::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
    if (::bind(fd.get(), address.get(), address.size) != 0 || ::listen(fd.get(), 1024) != 0) {
        return os_error("listening on " + text);
    }
    return fd;
}

Result<bool> wait_for(int fd, short events, Deadline end, const std::atomic<bool>* given_up) {
    for (;;) {
        if (given_up != nullptr && given_up->load()) return Error{Code::kClosed, "given up meanwhile"};
        auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        int64_t piece_ms = std::max<int64_t>(left.count(), 0);
        if (given_up != nullptr) piece_ms = std::min<int64_t>(piece_ms, kLookMs);
        pollfd waiting{fd, events, 0};
        int n = ::poll(&waiting, 1, static_cast<int>(piece_ms));
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return os_error("poll");
        if (std::chrono::steady_clock::now() >= end) return false;
    }
}

namespace {

Result<Fd> connect_one(const SocketAddress& address, const std::string& text, Deadline end,
                       const std::string& interface, const std::atomic<bool>* given_up) {
    Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    if (Status status = prepare_socket(fd.get(), interface); !status) return status.error();
    auto unavailable = [&](int error) {
        return Error{Code::kUnavailable, "nothing answers at " + text + " (" + std::strerror(error) + ")"};
    };
    if (::connect(fd.get(), address.get(), address.size) != 0) {
        if (errno != EINPROGRESS && errno != EINTR) return unavailable(errno);
        Result<bool> ready = wait_for(fd.get(), POLLOUT, end, given_up);
        if (!ready) return ready.error();
        if (!*ready) return Error{Code::kTimeout, text + " took no connection in time"};
        int error = 0;
        socklen_t size = sizeof(error);
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0) return unavailable(error);
    }
    // A port without a listener, tried from its own host, can be given to the caller itself.
    if (local_address(fd.get()) == peer_address(fd.get())) return unavailable(ECONNREFUSED);
    int flags = ::fcntl(fd.get(), F_GETFL);
    ::fcntl(fd.get(), F_SETFL, flags & ~O_NONBLOCK);
    return fd;
}

}  // namespace

Result<Fd> connect_tcp(const std::string& text, int timeout_ms, const std::string& interface,
                       const std::atomic<bool>* given_up) {
    Result<std::vector<SocketAddress>> addresses = resolve(text, false);
    if (!addresses) return addresses.error();
    Error last{Code::kUnavailable, text + " has no address"};
    Deadline end = deadline_in(timeout_ms);
    for (size_t i = 0; i < addresses->size(); ++i) {
        // Each gets a fair share of what is left, so that a silent one does not cost the others their turn.
        auto now = std::chrono::steady_clock::now();
        auto share = (end - now) / static_cast<int64_t>(addresses->size() - i);
        Result<Fd> fd = connect_one((*addresses)[i], text, now + share, interface, given_up);
        if (fd) return fd;
        last = fd.error();
        if (last.code == Code::kClosed) break;  // given up
        if (last.code == Code::kTimeout) {
            last.text = text + " took no connection within " + std::to_string(timeout_ms) + " ms";
        }
    }
    return last;
}

}  // namespace moonpool
