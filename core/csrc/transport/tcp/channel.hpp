// Channel: the initiator's end of one connection. It belongs to one user at a time: the pool, a caller that
// drives it, or an I/O thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "transport/frames.hpp"

namespace moonpool::transport::tcp {

inline constexpr uint64_t kFrameBytes = 2u << 20;  // moved by one frame

struct Channel {
    Channel(Fd socket, uint32_t n, std::string text, uint64_t frame = kFrameBytes)
        : fd(std::move(socket)), number(n), path(std::move(text)), frame_bytes(frame) {}

    Fd fd;  // non-blocking
    ClosedInChildren closed_in_children{fd};
    uint32_t number;   // unique among this initiator's connections to this target
    std::string path;  // "127.0.0.1:40000 -> 127.0.0.1:7710"
    uint64_t frame_bytes;
    uint64_t next_request = 1;
    bool wrote = false;  // it carried bytes of writes: to be fenced when it is given up
};

// One control question and its answer, waiting at most timeout_ms for each byte of progress, and not once
// `given_up` is set.
Result<std::vector<std::byte>> exchange(Channel& channel, Kind kind, const std::vector<std::byte>& body,
                                        int timeout_ms, const std::atomic<bool>* given_up);

}  // namespace moonpool::transport::tcp
