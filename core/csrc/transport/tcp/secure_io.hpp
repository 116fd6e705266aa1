// Bytes between a connection inside TLS and memory of users, in place of recvmsg(2) and sendmsg(2).
//
// The kernel answers EFAULT where a user has unmapped memory that is registered. OpenSSL, which copies by
// itself, would die of it (SIGSEGV). So what is not certain to stay mapped passes through staging memory of
// this thread, which is a memfd: pwritev(2) and preadv(2) copy between it and the user's memory and meet the
// EFAULT. They reach what recvmsg and sendmsg reach, pinned memory of cards' drivers included, and need no
// right that a container may lack, as process_vm_readv does.
//
// Threads: any, one at a time for each connection. No call waits. Cost: one more copy of each byte, within
// kStagingBytes that stay in the cache; none where memory stays mapped (Region::stays_mapped).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

#include "wire/tls.hpp"

namespace moonpool::transport::tcp {

// In one call; then it is the turn of others.
inline constexpr size_t kSecureTurnBytes = 1u << 20;

// Twice of what TLS holds when a socket is full. More is answers to key updates, of a peer that reads none.
inline constexpr size_t kUnsentBytesMax = 256u << 10;

// One connection's socket and its TLS; tls null: in plain.
struct SecureSocket {
    int fd;
    TlsStream* tls;

    // As recvmsg(2) and sendmsg(2) without waiting. may_fault: a part may be memory that its user has
    // unmapped. At most kPartsMax parts.
    //
    // receive() has taken bytes for such a part out of the connection: it tells the number of each in
    // `unmapped` (null: fails with EFAULT), and goes on with the parts behind it. send() stops before such a
    // part, and fails with EFAULT when that is the first.
    ssize_t receive(const iovec* parts, size_t count, bool may_fault, std::vector<size_t>* unmapped) const;
    ssize_t send(const iovec* parts, size_t count, bool may_fault) const;
    // What TLS holds: of what was sent, and of what came. A poll of the socket tells of neither.
    bool unsent() const { return tls != nullptr && tls->unsent(); }
    size_t unsent_bytes() const { return tls == nullptr ? 0 : tls->unsent_bytes(); }
    bool pending() const { return tls != nullptr && tls->pending(); }
};
inline constexpr size_t kPartsMax = 1024;

// To memory that its user may have unmapped. False: errno says why, EFAULT where it is not mapped.
bool copy_to_user(void* to, const void* from, size_t size);

}  // namespace moonpool::transport::tcp
