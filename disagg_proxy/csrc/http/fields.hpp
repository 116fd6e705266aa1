// Header fields: what a name means to a proxy, and which fields end here.
//
// A hop-by-hop field (RFC 9110 section 7.6.1) describes one connection, so it is dropped on both ways; so is
// every field that `Connection` names. The framing fields (Content-Length, Transfer-Encoding) are read by the
// parsers and written anew by the sender of the message.
//
// Nothing in http/ knows a socket, a thread or a clock. All views point into the caller's bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moonpool::http {

// The names that the parsers act upon; every other one is kOther.
enum class FieldKind : uint8_t {
    kOther,
    kHost,
    kContentLength,
    kContentType,
    kTransferEncoding,
    kConnection,
    kExpect,
    kRequestId,  // X-Request-Id
    kHopByHop,   // Keep-Alive, Proxy-*, TE, Trailer, Upgrade, HTTP2-Settings
};

// One field as it came: the name in its own case, the value without blanks around it.
// forward: it goes on to the other side; what does not is read by the parser, or ends here.
struct Field {
    std::string_view name;
    std::string_view value;
    FieldKind kind = FieldKind::kOther;
    bool forward = true;
};

using Fields = std::vector<Field>;

FieldKind kind_of(std::string_view name);

// Equal but for the case of ASCII letters.
bool same_name(std::string_view a, std::string_view b);

// The first field of this name in any case (forwarded or not), or nullptr.
const Field* find_field(std::span<const Field> fields, std::string_view name);

// The comma-separated words of a value, blanks taken off, empty ones left out: calls `take(word)` for each.
template <class Take>
void each_token(std::string_view value, Take take) {
    while (!value.empty()) {
        size_t comma = value.find(',');
        std::string_view word = value.substr(0, comma);
        value = comma == std::string_view::npos ? std::string_view() : value.substr(comma + 1);
        while (!word.empty() && (word.front() == ' ' || word.front() == '\t')) word.remove_prefix(1);
        while (!word.empty() && (word.back() == ' ' || word.back() == '\t')) word.remove_suffix(1);
        if (!word.empty()) take(word);
    }
}

// Whether text can be written as a field's name (a token of RFC 9110) or value (no control but the tab).
// A caller that writes a field whose text came from elsewhere asks first: CR LF in it would be another field.
bool is_field_name(std::string_view text);
bool is_field_value(std::string_view text);

// Clears `forward` of every field that a Connection field names, but for Content-Length, which each reader
// judges by itself. False: Connection names more than 64 fields, which is refused rather than compared with
// all others. close: whether `close` was among them.
bool apply_connection(std::span<Field> fields, bool& close);

}  // namespace moonpool::http
