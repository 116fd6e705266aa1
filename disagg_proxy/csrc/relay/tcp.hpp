// What this relay asks of TCP.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace moonpool::relay {

// No delay of small pieces, and an end to connections whose host vanished: keep-alive probes while nothing is
// under way, a limit on unacknowledged data while something is. Without it a lost peer is noticed after some
// 15 minutes, or never.
void tune(int fd, int dead_peer_s);

// How a non-blocking write or read ended: bytes moved, or 0 for "not now", or kBroken.
inline constexpr ptrdiff_t kBroken = -1;
ptrdiff_t write_some(int fd, const iovec* pieces, size_t count);

// The bytes that a peer has not taken yet.
class OutBuffer {
   public:
    size_t size() const { return bytes_.size() - sent_; }
    bool empty() const { return size() == 0; }
    void append(std::string_view bytes) { bytes_.append(bytes); }
    // Write what the socket takes. False: it is broken.
    bool flush(int fd);
    void clear();

   private:
    std::string bytes_;
    size_t sent_ = 0;
};

}  // namespace moonpool::relay
