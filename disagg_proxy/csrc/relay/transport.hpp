// Transport: what a socket of the relay's reads and writes, plain or inside TLS. Plain, each call is one of
// the kernel's. TLS reads one record at a time (wire/tls.hpp), so that epoll tells of all that is left.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "relay/tcp.hpp"
#include "wire/tls.hpp"

namespace moonpool::relay {

class Transport {
   public:
    // From now on inside TLS, which begins with its handshake; nullptr: with one whose stream is made when
    // the other side has sent something, so that a silent connection costs no more than a plain one.
    void begin_tls(std::unique_ptr<TlsStream> stream) {
        tls_ = std::move(stream);
        shaking_ = true;
    }
    void end_tls() {  // what follows is plain
        tls_.reset();
        shaking_ = false;
    }
    bool shaking() const { return shaking_; }
    TlsStream* tls() const { return tls_.get(); }
    // With a stream. kWait: for bytes, and while unsent() for room.
    TlsStream::Step shake(int fd) {
        TlsStream::Step step = tls_->handshake(fd);
        shaking_ = step != TlsStream::Step::kDone;
        return step;
    }

    // The rest is for when the handshake is over.

    // As recv(2). TLS: into room for a whole record at least.
    ssize_t receive(int fd, std::vector<char>& room) {
        return tls_ == nullptr ? ::recv(fd, room.data(), room.size(), 0)
                               : tls_->receive(fd, room.data(), room.size());
    }
    // As relay::write_some(). What TLS took may still be here, as unsent() tells: it goes by flush(), or with
    // what is written next.
    ptrdiff_t write_some(int fd, const iovec* pieces, size_t count) {
        return tls_ == nullptr ? relay::write_some(fd, pieces, count) : seal_some(fd, pieces, count);
    }
    size_t unsent() const { return tls_ == nullptr ? 0 : tls_->unsent_bytes(); }
    bool flush(int fd) { return tls_ == nullptr || flush_tls(fd); }  // false: it is broken
    // The end of the bytes that come is the one that the other side meant, not a cut.
    bool ended_well() const { return tls_ == nullptr || tls_->ended_well(); }
    // Nothing more is written here, and the other side is told so before the socket is closed.
    void say_end(int fd) {
        if (tls_ != nullptr && !shaking_) tls_->end(fd);
    }

   private:
    ptrdiff_t seal_some(int fd, const iovec* pieces, size_t count);
    bool flush_tls(int fd);

    std::unique_ptr<TlsStream> tls_;
    bool shaking_ = false;
};

}  // namespace moonpool::relay
