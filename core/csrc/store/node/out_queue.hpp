// OutQueue: what waits to be sent to one client. Frames, and between them the bytes of objects, which go out
// straight from the arena: a piece holds a pin until its last byte is in the socket.
//
//   frames   | answer | rows of a READ |          | next answer |
//   pieces                             ^at: piece, piece
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "wire/tls.hpp"

namespace moonpool {

struct OutPiece {
    size_t at = 0;  // goes out once this much of frames() has
    const std::byte* data = nullptr;
    uint64_t size = 0;
    uint32_t slot = 0;  // whose pin it holds
    uint64_t generation = 0;
};

class OutQueue {
   public:
    std::vector<std::byte>& frames() { return frames_; }

    // Behind all frames so far.
    void add(const std::byte* data, uint64_t size, uint32_t slot, uint64_t generation) {
        pieces_.push_back({frames_.size(), data, size, slot, generation});
        piece_bytes_ += size;
    }

    uint64_t backlog() const { return frames_.size() - sent_ + piece_bytes_; }
    // Drops what was written behind `size` bytes of frames, unless it has begun to go out.
    void truncate(size_t size);

    // Sends what the socket takes without waiting, at most about `max` bytes. Pieces that are through are
    // appended to `done`, and the bytes that went out added to `moved`. tls: null: in plain; else it may keep
    // up to a record that the socket did not take. False: the connection is lost.
    bool flush(int fd, TlsStream* tls, uint64_t max, std::vector<OutPiece>& done, uint64_t& moved);

    const std::deque<OutPiece>& pieces() const { return pieces_; }
    // What is to go out where there are no pieces.
    std::span<const std::byte> unsent() const { return std::span(frames_).subspan(sent_); }

   private:
    size_t gather(iovec* parts, size_t parts_max, uint64_t max) const;
    void advance(uint64_t n, std::vector<OutPiece>& done);

    std::vector<std::byte> frames_;
    size_t sent_ = 0;
    std::deque<OutPiece> pieces_;
    uint64_t piece_bytes_ = 0;
};

}  // namespace moonpool
