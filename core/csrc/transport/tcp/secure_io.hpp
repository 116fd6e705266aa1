// Bytes between a connection inside TLS and memory of users, in place of recvmsg(2) and sendmsg(2). In plain
// they are those two calls and nothing else.
//
// The kernel answers EFAULT where a user has unmapped memory that is registered. OpenSSL, which copies by
// itself, would die of it (SIGSEGV). So what is not certain to stay mapped passes through staging memory
// (staging.hpp), and so do small ranges that are sent, of which each would cost a record of its own.
//
// Threads: any, one at a time for each connection. No call waits for a peer. Cost: one more copy of those
// bytes, within kStagingBytes that stay in the cache; none of large ranges that stay mapped
// (Region::stays_mapped).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

#include "transport/tcp/staging.hpp"
#include "wire/tls.hpp"

namespace moonpool::transport::tcp {

// In one call; then it is the turn of others.
inline constexpr size_t kSecureTurnBytes = 1u << 20;

// Twice of what TLS holds when a socket is full. More is answers to key updates, of a peer that reads none.
inline constexpr size_t kUnsentBytesMax = 256u << 10;

// One connection's socket and its TLS; tls null: in plain, and there is no staging. staging: reserved for it.
struct SecureSocket {
    int fd;
    TlsStream* tls;
    StagingPool* staging;

    // As recvmsg(2) and sendmsg(2) without waiting. may_fault: a part may be memory that its user has
    // unmapped. At most kPartsMax parts.
    //
    // receive() has taken bytes for such a part out of the connection: it tells the number of each in
    // `unmapped` (null: fails with EFAULT), and goes on with the parts behind it. send() stops before such a
    // part, and fails with EFAULT when that is the first.
    ssize_t receive(const iovec* parts, size_t count, bool may_fault, std::vector<size_t>* unmapped) const;
    ssize_t send(const iovec* parts, size_t count, bool may_fault) const;
    // Inside TLS: bytes that came before, to parts that may be unmapped, as receive() does.
    // -> how many, as far as the parts have room; -1: errno says why.
    ssize_t put(const iovec* parts, size_t count, const std::byte* from, size_t size,
                std::vector<size_t>* unmapped) const;
    // What TLS holds: of what was sent, and of what came. A poll of the socket tells of neither.
    bool unsent() const { return tls != nullptr && tls->unsent(); }
    size_t unsent_bytes() const { return tls == nullptr ? 0 : tls->unsent_bytes(); }
    bool pending() const { return tls != nullptr && tls->pending(); }
};

}  // namespace moonpool::transport::tcp
