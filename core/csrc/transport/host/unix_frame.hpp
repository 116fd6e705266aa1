// Frames over a Unix socket, one question at a time, each with at most one descriptor.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <vector>

#include "base/fd.hpp"
#include "base/result.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::host {

// Sends what the socket takes of a frame from that byte on, as ::sendmsg; `passed` rides on its first byte
// (-1: none).
ssize_t send_part(int fd, const std::vector<std::byte>& frame, size_t from, int passed, int flags);

// Sends a whole frame over a blocking socket.
Status send_frame(int fd, const std::vector<std::byte>& frame);

// Reads one whole frame of at most bytes_max.
Status receive_frame(int fd, FrameHeader& header, std::vector<std::byte>& body, uint32_t bytes_max,
                     Fd* passed);

}  // namespace moonpool::transport::host
