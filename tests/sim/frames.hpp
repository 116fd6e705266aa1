// Frames of the real wire format, built and taken apart.
#pragma once

#include <cstring>

#include "network.hpp"
#include "wire/frame.hpp"

namespace moonpool::sim {

template <class Build>
Bytes make_frame(Kind kind, uint16_t flags, uint64_t request_id, Build build) {
    Bytes out;
    out.reserve(128);
    size_t at = begin_frame(out, kind, flags, request_id);
    Writer w(out);
    build(w);
    finish_frame(out, at);
    return out;
}

inline FrameHeader header_of(const Bytes& frame) {
    FrameHeader header;
    std::memcpy(&header, frame.data(), sizeof(header));
    return header;
}
inline Reader body_of(const Bytes& frame) { return Reader(std::span(frame).subspan(sizeof(FrameHeader))); }

}  // namespace moonpool::sim
