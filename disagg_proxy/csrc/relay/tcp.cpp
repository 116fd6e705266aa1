#include "relay/tcp.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace moonpool::relay {

namespace {

constexpr size_t kUnsentBytesKept = 16 << 10;

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

bool OutBuffer::flush(int fd) {
    while (!empty()) {
        iovec piece{bytes_.data() + sent_, size()};
        ptrdiff_t n = write_some(fd, &piece, 1);
        if (n == kBroken) return false;
        if (n == 0) {
            if (sent_ > size()) {  // at most as much is moved as was sent since the last time
                bytes_.erase(0, sent_);
                sent_ = 0;
            }
            return true;
        }
        sent_ += static_cast<size_t>(n);
    }
    clear();
    return true;
}

void OutBuffer::clear() {
    bytes_.clear();
    sent_ = 0;
    if (bytes_.capacity() > kUnsentBytesKept) bytes_.shrink_to_fit();
}

}  // namespace moonpool::relay
