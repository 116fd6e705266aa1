// A client's request head: bytes to values, strictly.
//
//     parser.parse(everything received since the last request)   again and again until it is not kMore
//     kDone:  head() is valid; its bytes are input[0, head().bytes), the body begins behind them
//     ... body: BodyReader(head().framing, head().content_length) ...
//     parser.reset()                                              before the next request
//
// Bytes behind the head are never looked at, so a client that pipelines many requests costs memory only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "http/body_reader.hpp"
#include "http/fields.hpp"
#include "http/head_lines.hpp"
#include "http/refusal.hpp"

namespace moonpool::http {

// One request head. All views point into the input of the call that returned kDone.
//
// method:          as sent; upper-case letters and '-'. What method may do what is the caller's business.
// target:          path and query, without scheme, host and fragment; begins with '/', or is "*".
// path:            target without the query.
// fields:          all of them in their order; `forward` ones go to the engine (not Host, not X-Request-Id,
// not
//                  framing, not hop-by-hop, not what Connection names).
// host:            the Host field's value ("" when HTTP/1.0 sent none).
// request_id:      the client's X-Request-Id when it is fit to be repeated (1 to 128 visible ASCII
// characters),
//                  else "": then the caller makes one.
// framing:         kLength (length 0 when the request has no body) or kChunked.
// content_length:  of the field; -1 when there was none.
// bytes:           of the head in the input, with blank lines before it.
struct RequestHead {
    std::string_view method, target, path;
    std::string_view host, request_id;
    Fields fields;
    bool http_1_0 = false;
    bool keep_alive = true;
    bool expects_continue = false;  // never for HTTP/1.0
    Framing framing = Framing::kLength;
    int64_t content_length = -1;
    size_t bytes = 0;

    // The input moved from `from` to `to` (a buffer grew): all views move along.
    void move_views(const char* from, const char* to);
};

struct RequestLimits {
    size_t head_bytes_max = 32 << 10;
    uint64_t body_bytes_max = 64 << 20;
};

class RequestParser {
   public:
    explicit RequestParser(RequestLimits limits = {}) : limits_(limits), lines_(limits.head_bytes_max) {}

    // input: all bytes of the connection behind the last request (never empty of what was given before); it
    // may lie elsewhere at each call. Refusals: 400 malformed, 431 head_too_large, 413 body_too_large (when
    // the length is known; beyond that BodyReader counts), 501 transfer_encoding, 505 http_version, 417
    // expect.
    Step parse(std::string_view input);

    const RequestHead& head() const { return head_; }
    RequestHead& head() { return head_; }
    const Refusal& refusal() const { return refusal_; }

    // Whether bytes of a head are there (blank lines do not count): what the head's deadline is about.
    bool begun() const { return lines_.begun(); }

    void reset();

   private:
    Step refuse(int status, const char* reason, std::string sentence);
    Step refuse_garbage(const char* why);
    Step refuse_head(const std::string& why);
    bool take_start_line(std::string_view line);
    Step take_fields();

    RequestLimits limits_;
    HeadLines lines_;
    RequestHead head_;
    Refusal refusal_;
};

// The refusal of a body that turned out larger than the limit while it was read.
Refusal body_too_large(uint64_t body_bytes_max);

}  // namespace moonpool::http
