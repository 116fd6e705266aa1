#include "relay/tcp.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace moonpool::relay {

namespace {

void set(int fd, int level, int option, int value) {
    (void)::setsockopt(fd, level, option, &value,
                       sizeof(value));  // of a socket that is none of TCP: no matter
}

}  // namespace

void tune(int fd, int dead_peer_s) {
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, dead_peer_s / 2));
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, dead_peer_s / 6));
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, dead_peer_s * 1000);
}

ptrdiff_t write_some(int fd, const iovec* pieces, size_t count) {
    for (;;) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(pieces);
        message.msg_iovlen = count;
        ptrdiff_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : kBroken;
    }
}

std::string peer_of(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    char text[INET6_ADDRSTRLEN] = "-";
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return text;
    if (address.ss_family == AF_INET) {
        ::inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in&>(address).sin_addr, text, sizeof(text));
    } else if (address.ss_family == AF_INET6) {
        ::inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6&>(address).sin6_addr, text, sizeof(text));
    }
    return text;
}

}  // namespace moonpool::relay
