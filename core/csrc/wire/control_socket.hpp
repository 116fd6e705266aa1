// ControlSocket: a socket to or from a master, plain or inside TLS. Reads and writes like recv(2) and
// send(2); without TLS they are exactly that.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <memory>

#include "base/fd.hpp"
#include "wire/tls.hpp"

namespace moonpool {

struct ControlSocket {
    Fd fd;
    std::unique_ptr<TlsStream> tls;  // null: plain
    int timeout_ms = 0;  // of a call that waits, without progress; of a plain socket, its own options

    ssize_t receive(void* data, size_t size, bool wait) {
        if (tls == nullptr) return ::recv(fd.get(), data, size, wait ? 0 : MSG_DONTWAIT);
        for (;;) {
            ssize_t n = tls->receive(fd.get(), data, size);
            if (n >= 0 || errno != EAGAIN || !wait || !ready(POLLIN)) return n;
        }
    }

    // What was taken may still wait inside, see unsent(); not if `wait`.
    ssize_t send(const void* data, size_t size, bool wait) {
        if (tls == nullptr) return ::send(fd.get(), data, size, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
        for (;;) {
            ssize_t n = tls->send(fd.get(), data, size);
            if (!wait || (n < 0 && errno != EAGAIN)) return n;
            while (tls->unsent()) {
                if (!tls->flush(fd.get()) && (errno != EAGAIN || !ready(POLLOUT))) return -1;
            }
            if (n >= 0) return n;
        }
    }

    bool unsent() const { return tls != nullptr && tls->unsent(); }
    bool flush() { return tls == nullptr || tls->flush(fd.get()) || errno == EAGAIN; }  // false: it is lost

   private:
    // False, and errno is EAGAIN: nothing came in time.
    bool ready(short events) {
        pollfd waiting{fd.get(), events, 0};
        int n = ::poll(&waiting, 1, timeout_ms);
        errno = EAGAIN;
        return n != 0;
    }
};

}  // namespace moonpool
