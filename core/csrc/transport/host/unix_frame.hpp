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

// Reads frames from a socket without waiting. What has come of a frame stays here, so that a caller that
// stops waiting in the middle of one can go on later.
class UnixFrameReader {
   public:
    explicit UnixFrameReader(uint32_t bytes_max) : bytes_max_(bytes_max) {}

    // True: a frame is here, whole, until the next call. False: its rest has not come yet.
    Result<bool> read(int fd);

    const FrameHeader& header() const { return header_; }
    std::vector<std::byte>& body() { return body_; }
    Fd& passed() { return passed_; }

   private:
    void begin();
    Result<bool> fill(int fd, void* data, size_t size);

    uint32_t bytes_max_;
    bool whole_ = false;
    size_t at_ = 0;  // bytes of this frame, with its header
    FrameHeader header_;
    std::vector<std::byte> body_;
    Fd passed_;
};

}  // namespace moonpool::transport::host
