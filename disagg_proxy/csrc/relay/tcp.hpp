// What this relay asks of TCP.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>

namespace moonpool::relay {

// No delay of small pieces, and an end to connections whose host vanished: keep-alive probes while nothing is
// under way, a limit on unacknowledged data while something is. Without it a lost peer is noticed after some
// 15 minutes, or never.
void tune(int fd, int dead_peer_s);

// The address of a connection's other side; "-": it has none.
std::string peer_of(int fd);

// How a non-blocking write or read ended: bytes moved, or 0 for "not now", or kBroken.
inline constexpr ptrdiff_t kBroken = -1;
ptrdiff_t write_some(int fd, const iovec* pieces, size_t count);

}  // namespace moonpool::relay
