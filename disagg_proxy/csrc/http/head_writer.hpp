// Writes heads: those that go on, less what ends here, and those of the proxy's own answers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "http/request_parser.hpp"
#include "http/response_parser.hpp"

namespace moonpool::http {

// A field that the proxy adds. Neither part is checked: see is_field_name and is_field_value.
struct OwnField {
    std::string_view name, value;
};

// Appends the head for an engine: method, target, Host, the request's forwarded fields, X-Request-Id,
// `extra`. content_length: of the body that follows; none: the request has no body (a GET without a length).
// A body goes with its length, whatever framing it came with: give the head's size when content_length >= 0
// or it was chunked or has bytes.
void write_request_head(std::string& out, const RequestHead& head, std::string_view host,
                        std::string_view request_id, std::optional<uint64_t> content_length,
                        std::span<const OwnField> extra = {});

// Appends the head for a client: status, phrase, the answer's forwarded fields, `extra` (X-Moonpool-Engine,
// X-Request-Id, ...). chunked: write Transfer-Encoding (false when the chunks were taken off for HTTP/1.0);
// close: write Connection: close.
void write_response_head(std::string& out, const ResponseHead& head, std::span<const OwnField> extra,
                         bool chunked, bool close);

struct OwnAnswer {
    int status = 200;
    std::string_view body = {};
    std::string_view content_type = "application/json";
    std::string_view request_id = {};  // "": no such field
    std::span<const OwnField> extra = {};
    bool close = false;
    bool head_only = false;  // Content-Length is the body's even where the body is left out
};

// Appends a whole answer of the proxy itself.
void write_own_answer(std::string& out, const OwnAnswer& answer);

// {"error": {"message", "type", "param", "code"}}, as clients of the OpenAI API expect it.
std::string error_body(int status, std::string_view reason, std::string_view sentence);

// The last event of a stream that broke; chunked: as a chunk, with the end of the body behind it.
std::string error_event(std::string_view reason, std::string_view sentence, bool chunked);

// The phrase of a status ("Not Found"), "" for one that has none.
std::string_view phrase_of(int status);

inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

}  // namespace moonpool::http
