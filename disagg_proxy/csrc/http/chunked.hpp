// Walks over the chunked transfer coding (RFC 9112 section 7.1), strictly: CRLF only, no signs, no blanks.
//
//     size-line CRLF  data CRLF  size-line CRLF  data CRLF ... 0 CRLF  [trailer CRLF]... CRLF
//     ^LINE           ^DATA ^END                                       ^TRAILER          ^done
//
// It keeps a few numbers and no bytes: lines are judged character by character as they arrive. Used to take
// the coding off (request bodies, clients of HTTP/1.0) and to know where a body ends that passes through as
// it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moonpool::http {

class ChunkedReader {
   public:
    static constexpr size_t kLineBytesMax = 1024;     // a size line with its extensions, or a trailer line
    static constexpr size_t kTrailerBytesMax = 8192;  // all trailers

    // Walks from the front of `input` over framing and then over content, up to the end of one chunk's
    // content in `input` at most; returns how many bytes it took. `content`: the part of them that is
    // content, always their end, "" when it met framing only. Takes nothing when done() or failed().
    size_t take(std::string_view input, std::string_view& content);

    bool done() const { return state_ == State::kDone; }
    bool failed() const { return why_ != nullptr; }
    const char* why() const { return why_; }  // words behind "the chunked body is malformed: "

    // Neither a chunk's content nor its size line stands half: another chunk could be written here.
    bool between_chunks() const { return state_ == State::kLine && line_bytes_ == 0; }

   private:
    enum class State : uint8_t { kLine, kData, kEnd, kTrailer, kDone };

    static constexpr uint8_t kDigitsMax = 15;  // so that a size fits in 60 bits

    bool take_framing(char octet);
    void take_size(char octet);
    void end_line();

    State state_ = State::kLine;
    bool cr_ = false;    // the octet before was CR: LF must follow
    bool free_ = false;  // behind the ";" of a size line or the ":" of a trailer
    uint8_t digits_ = 0;
    uint64_t left_ = 0;  // of the chunk's content
    size_t line_bytes_ = 0, trailer_bytes_ = 0;
    const char* why_ = nullptr;
};

}  // namespace moonpool::http
