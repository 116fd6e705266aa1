// Channel: the initiator's end of one connection whose target has been greeted. One thread at a time uses it:
// the one that drives its Stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/journal.hpp"
#include "transport/frames.hpp"
#include "transport/identity.hpp"
#include "transport/tcp/secure_io.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

inline constexpr uint64_t kFrameBytes = 2u << 20;  // moved by one frame

struct ChannelOptions {
    DialOptions dial;
    SegmentId self{};
    std::string self_name;
    SegmentId peer{};
    uint64_t frame_bytes = kFrameBytes;
    std::shared_ptr<StagingPool> staging = nullptr;  // of connections inside TLS
    std::shared_ptr<Journal> journal = nullptr;      // null: not told
};

struct Channel {
    Channel(Fd socket, std::unique_ptr<TlsStream> secure, uint32_t n, std::string text, uint64_t frame)
        : fd(std::move(socket)),
          tls(std::move(secure)),
          number(n),
          path(std::move(text)),
          frame_bytes(frame) {}

    SecureSocket socket() const { return {fd.get(), tls.get(), staging.get()}; }

    Fd fd;                                 // non-blocking
    std::unique_ptr<TlsStream> tls;        // null: in plain
    std::shared_ptr<StagingPool> staging;  // reserved, with tls
    ClosedInChildren closed_in_children{fd};
    uint32_t number;   // never used twice in a process: a fence names it, and must not mean a later one
    std::string path;  // "127.0.0.1:40000 -> 127.0.0.1:7710"
    uint64_t frame_bytes;
    uint64_t next_request = 1;
    bool wrote = false;  // it carried bytes of writes: to be fenced when it is given up
};

// Greets the target on a new connection. Waits, on the calling thread, for options.dial.timeout_ms at most,
// and not once options.dial.given_up is set.
// Behind a dial: what the files of TLS have that cannot be used, for the log.
void tell_trouble(const ChannelOptions& options);

Result<std::unique_ptr<Channel>> greet(const ChannelOptions& options, Dialed dialed);

}  // namespace moonpool::transport::tcp
