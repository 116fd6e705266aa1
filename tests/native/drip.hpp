// A peer that sends one byte now and then.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool::testing {

// Sends these bytes, then zeros, one each 20 ms, until the other side hangs up -> how many ms after `begin`,
// when the frame began; 0: it did not within 8 s.
inline int64_t drip(int fd, const std::vector<std::byte>& bytes = {},
                    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now()) {
    auto spent_ms = [&] {
        auto spent = std::chrono::steady_clock::now() - begin;
        return std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::milliseconds>(spent).count());
    };
    std::byte said[4096];
    for (size_t at = 0; spent_ms() < 8000; ++at) {
        std::byte next = at < bytes.size() ? bytes[at] : std::byte{0};
        if (::send(fd, &next, 1, MSG_NOSIGNAL) != 1) return spent_ms();
        pollfd p{fd, POLLIN, 0};
        if (::poll(&p, 1, 20) == 1 && ::recv(fd, said, sizeof(said), 0) <= 0) return spent_ms();
    }
    return 0;
}

}  // namespace moonpool::testing
