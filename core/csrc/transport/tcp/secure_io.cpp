#include "transport/tcp/secure_io.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moonpool::transport::tcp {

ssize_t SecureSocket::receive(const iovec* parts, size_t count, bool may_fault,
                              std::vector<size_t>* unmapped) const {
    if (tls == nullptr) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts);
        message.msg_iovlen = count;
        return ::recvmsg(fd, &message, MSG_DONTWAIT);
    }
    Cursor to(parts, count);
    iovec ranges[kPartsMax];
    if (!may_fault) {
        size_t n = to.next(kSecureTurnBytes, ranges).first;
        return tls->receive(fd, ranges, n);
    }
    StagingPool::Lease lease = staging->take();
    ssize_t all = 0;
    while (!to.at_end() && static_cast<size_t>(all) < kSecureTurnBytes) {
        iovec room{lease->data(), to.next(kStagingBytes, ranges).second};
        ssize_t n = tls->receive(fd, &room, 1);
        if (n <= 0) return all != 0 ? all : n;
        if (!lease->scatter(to, static_cast<size_t>(n), unmapped)) return -1;
        all += n;
        if (static_cast<size_t>(n) < room.iov_len) break;
    }
    return all;
}

ssize_t SecureSocket::send(const iovec* parts, size_t count, bool may_fault) const {
    if (tls == nullptr) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts);
        message.msg_iovlen = count;
        return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (!tls->flush(fd)) return -1;  // before anything is copied that has no room
    ssize_t all = 0;
    for (Cursor from(parts, count); !from.at_end() && static_cast<size_t>(all) < kSecureTurnBytes;) {
        iovec ranges[kPartsMax];
        auto [n_ranges, bytes] = from.next(kStagingBytes, ranges);
        ssize_t sent;
        // A record for each small range would cost more than the copy.
        if (may_fault || (n_ranges > 1 && n_ranges * kTlsRecordBytes > bytes)) {
            StagingPool::Lease lease = staging->take();
            if (may_fault) {
                ssize_t n = lease->gather(ranges, n_ranges);
                if (n <= 0) return all != 0 ? all : -1;
                bytes = static_cast<size_t>(n);
            } else {
                std::byte* at = lease->data();
                for (size_t i = 0; i < n_ranges; at += ranges[i++].iov_len) {
                    std::memcpy(at, ranges[i].iov_base, ranges[i].iov_len);
                }
            }
            iovec gathered{lease->data(), bytes};
            sent = tls->send(fd, &gathered, 1);
        } else {
            sent = tls->send(fd, ranges, n_ranges);
        }
        if (sent < 0) return all != 0 ? all : -1;
        from.advance(static_cast<size_t>(sent));
        all += sent;
        if (tls->unsent() || static_cast<size_t>(sent) < bytes) break;
    }
    return all;
}

ssize_t SecureSocket::put(const iovec* parts, size_t count, const std::byte* from, size_t size,
                          std::vector<size_t>* unmapped) const {
    StagingPool::Lease lease = staging->take();
    ssize_t all = 0;
    for (Cursor to(parts, count); size != 0 && !to.at_end();) {
        iovec ranges[kPartsMax];
        size_t n = to.next(std::min(size, kStagingBytes), ranges).second;
        std::memcpy(lease->data(), from, n);
        if (!lease->scatter(to, n, unmapped)) return -1;
        from += n;
        size -= n;
        all += static_cast<ssize_t>(n);
    }
    return all;
}

}  // namespace moonpool::transport::tcp
