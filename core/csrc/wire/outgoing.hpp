// Outgoing: bytes on their way into a ControlSocket that does not wait.
#pragma once

#include <cerrno>
#include <cstddef>
#include <vector>

#include "wire/control_socket.hpp"

namespace moonpool {

struct Outgoing {
    static constexpr size_t kKeptMax = 64u << 10;  // of the buffer, while nothing is in it
    std::vector<std::byte> bytes;
    size_t sent = 0;

    size_t waiting() const { return bytes.size() - sent; }
    // As much as the socket takes. False: it is lost.
    bool flush(ControlSocket& socket) {
        if (socket.unsent() && !socket.flush()) return false;
        while (sent < bytes.size()) {
            ssize_t n = socket.send(bytes.data() + sent, bytes.size() - sent, false);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && errno == EAGAIN) break;
            if (n < 0) return false;
            sent += static_cast<size_t>(n);
        }
        if (sent != bytes.size()) return true;
        if (bytes.capacity() > kKeptMax) decltype(bytes)().swap(bytes);
        bytes.clear();
        sent = 0;
        return true;
    }
};

}  // namespace moonpool
