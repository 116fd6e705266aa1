// An engine's answer head: bytes to values, strictly. Interim answers (1xx) are skipped.
//
//     parser.begin(head_only)                                once per request sent
//     parser.parse(everything received since then)           until it is not kMore
//     kDone:  head() is valid; the body begins at input[head().bytes]
//     ... body: BodyReader(head().framing, head().content_length); pass it on as it came ...
//
// Bytes behind a whole answer are an error: the caller sees them as what BodyReader did not take, relays none
// of them and closes the engine's connection, so no second answer can be smuggled to a client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "http/body_reader.hpp"
#include "http/fields.hpp"
#include "http/head_lines.hpp"
#include "http/refusal.hpp"

namespace moonpool::http {

// One answer head. All views point into the input of the call that returned kDone.
//
// fields:          all in their order; `forward` ones go to the client (Content-Length among them; not
//                  Transfer-Encoding, X-Request-Id, hop-by-hop, nor what Connection names).
// framing:         kLength (0 for HEAD, 204, 304), kChunked or kUntilClose.
// content_length:  of the body that follows; 0 where none does, -1 where the framing is not kLength. What the
//                  field said of a HEAD answer stands in the fields.
// keep_alive:      the connection can carry another request once the body is read to its end.
struct ResponseHead {
    int status = 0;
    std::string_view phrase;
    Fields fields;
    Framing framing = Framing::kLength;
    int64_t content_length = -1;
    bool keep_alive = false;
    bool event_stream = false;  // Content-Type: text/event-stream
    size_t bytes = 0;           // in the input, interim answers included

    void move_views(const char* from, const char* to);
};

class ResponseParser {
   public:
    static constexpr size_t kHeadBytesMax = 64 << 10;

    explicit ResponseParser(size_t head_bytes_max = kHeadBytesMax)
        : head_bytes_max_(head_bytes_max), lines_(head_bytes_max) {}

    // head_only: the request was HEAD, no body follows whatever the fields say.
    void begin(bool head_only);

    // head_bytes_max counts interim answers and the answer's head together.
    // Refusals have status 502, reason "bad_answer", and a sentence that goes on behind "engine NAME sent a
    // broken answer: ".
    Step parse(std::string_view input);

    const ResponseHead& head() const { return head_; }
    ResponseHead& head() { return head_; }
    const Refusal& refusal() const { return refusal_; }

   private:
    Step refuse(std::string sentence);
    bool take_start_line(std::string_view line);
    Step take_fields();

    size_t head_bytes_max_;
    bool head_only_ = false;
    bool http_1_0_ = false;
    HeadLines lines_;
    ResponseHead head_;
    Refusal refusal_;
};

}  // namespace moonpool::http
