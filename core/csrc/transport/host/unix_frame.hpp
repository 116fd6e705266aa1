// Frames over a blocking Unix socket, one question at a time, each with at most one descriptor.
#pragma once

#include <cstddef>
#include <vector>

#include "base/fd.hpp"
#include "base/result.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::host {

// Sends a whole frame, `passed` riding on its first byte (-1: none).
Status send_frame(int fd, const std::vector<std::byte>& frame, int passed = -1);

// Reads one whole frame of at most bytes_max.
Status receive_frame(int fd, FrameHeader& header, std::vector<std::byte>& body, uint32_t bytes_max,
                     Fd* passed);

}  // namespace moonpool::transport::host
