// Finds where a body ends, by any framing, in bytes that arrive in pieces; never copies.
//
//     take(input)   one piece of content at most: to read a body (loop until it takes nothing)
//     pass(input)   all bytes of input that belong to the body: to hand a body on as it came, framing
//     included
//
// Use one of the two for one body. Both return less than the input when the body ends in it: what is left
// over is the next request of a client, and an error from an engine.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "http/chunked.hpp"

namespace moonpool::http {

enum class Framing : uint8_t {
    kLength,      // as many bytes as were announced; 0 when no body follows
    kChunked,     // the chunked transfer coding
    kUntilClose,  // answers only: until the engine closes its side
};

class BodyReader {
   public:
    struct Piece {
        size_t taken = 0;          // bytes of the input, framing included; go on behind them
        std::string_view content;  // what of them is content; may be ""
    };

    BodyReader() : BodyReader(Framing::kLength, 0) {}
    // length: of kLength (below 0 counts as 0); else ignored.
    BodyReader(Framing framing, int64_t length);

    Piece take(std::string_view input);
    // The same for all of the input; appends its content.
    void take_all(std::string_view input, std::string& content);
    std::string_view pass(std::string_view input);

    // The body is whole. Known right after construction when its length is 0.
    bool done() const { return done_; }
    // The framing is broken (chunked only): why() goes on behind "the ... chunked body is malformed: ".
    bool failed() const { return chunks_.failed(); }
    const char* why() const { return chunks_.why(); }

    // The sender closed its side: whether that is the proper end of this body.
    bool finish();

    // Of a body that is an event stream: no chunk and no event stands half, so an event of our own could
    // follow what was passed on. Never with kLength: the length is promised.
    bool between_events() const;

   private:
    void note(std::string_view content);

    Framing framing_;
    bool done_ = false;
    uint64_t left_ = 0;
    uint64_t content_bytes_ = 0;
    std::array<char, 3> tail_ = {};  // the last bytes of the content
    ChunkedReader chunks_;
};

}  // namespace moonpool::http
