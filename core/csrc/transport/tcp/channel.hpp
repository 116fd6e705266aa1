// Channel: the initiator's end of one connection. It belongs to one user at a time: the pool, a caller that
// drives it, or an I/O thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "transport/frames.hpp"

namespace moonpool::transport::tcp {

struct Channel {
    Channel(Fd socket, uint32_t n, std::string text)
        : fd(std::move(socket)), number(n), path(std::move(text)) {}

    Fd fd;  // non-blocking
    ClosedInChildren closed_in_children{fd};
    uint32_t number;   // unique among this initiator's connections to this target
    std::string path;  // "127.0.0.1:40000 -> 127.0.0.1:7710"
    uint64_t next_request = 1;
    bool wrote = false;  // it carried bytes of writes: to be fenced when it is given up
};

// One control question and its answer, waiting at most timeout_ms for each byte of progress.
Result<std::vector<std::byte>> exchange(Channel& channel, Kind kind, const std::vector<std::byte>& body,
                                        int timeout_ms);

}  // namespace moonpool::transport::tcp
