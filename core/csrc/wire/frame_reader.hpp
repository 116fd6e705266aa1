// FrameReader: the bytes of a socket in, whole frames out, each where it arrived. Memory follows what was
// sent, never a length that was claimed.
//
//     |  taken  |  received, not taken  |  room  |
//     0      begin_                   end_    size
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "wire/frame.hpp"

namespace moonpool {

class FrameReader {
   public:
    // Where the next bytes go, at least `bytes_min`. What was handed out before is void.
    std::span<std::byte> room(size_t bytes_min) {
        if (begin_ == end_) begin_ = end_ = 0;
        if (in_.size() - end_ < bytes_min) {
            if (begin_ != 0) std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
            if (in_.size() - end_ < bytes_min) in_.resize(std::max(in_.size() * 2, bytes_min * 2));
        }
        return std::span(in_).subspan(end_);
    }
    void received(size_t bytes) { end_ += bytes; }

    // The header of the next frame; nothing: not all of it is here.
    std::optional<FrameHeader> header() const {
        if (end_ - begin_ < sizeof(FrameHeader)) return std::nullopt;
        FrameHeader header;
        std::memcpy(&header, in_.data() + begin_, sizeof(header));
        return header;
    }
    // The body of the frame with that header, which is taken with it; nothing: not all of it is here.
    std::optional<Reader> body(const FrameHeader& header) {
        size_t bytes = sizeof(header) + header.length;
        if (end_ - begin_ < bytes) return std::nullopt;
        Reader body(std::span<const std::byte>(in_).subspan(begin_ + sizeof(header), header.length));
        begin_ += bytes;
        return body;
    }

    std::span<const std::byte> waiting() const { return std::span(in_).subspan(begin_, end_ - begin_); }
    void take(size_t bytes) { begin_ += bytes; }
    void clear() { begin_ = end_ = 0; }
    // After a rare large frame: thousands of connections wait most of the time.
    void shrink(size_t bytes_max) {
        if (begin_ == end_ && in_.size() > bytes_max) *this = FrameReader();
    }

   private:
    std::vector<std::byte> in_;
    size_t begin_ = 0, end_ = 0;
};

// Why a header is refused, for its sender. `process`: what reads it, as "node"; `setting`: of the limit.
inline std::optional<Error> unfit(const FrameHeader& header, uint32_t bytes_max, const char* process,
                                  const char* setting) {
    if (header.magic != kMagic) {
        return Error{Code::kProtocol,
                     "a frame does not start with the magic number; the connection is closed"};
    }
    // agree_on_auth() judges what an AUTH says.
    if (header.version != kVersion && header.kind != Kind::kAuth) {
        return other_version(header, {std::string("this ") + process, kWireVersions}, "the caller");
    }
    if (header.length > bytes_max) {
        return Error{Code::kTooLarge, "a frame of " + std::to_string(header.length) +
                                          " bytes is over the limit of " + std::to_string(bytes_max) + " (" +
                                          setting + ")"};
    }
    return std::nullopt;
}

}  // namespace moonpool
