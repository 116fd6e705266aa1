#include "relay/trace.hpp"

#include <algorithm>

namespace moonpool::relay {

namespace {

constexpr size_t kBytes = 55;

int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool read_hex(std::string_view text, uint8_t* out) {
    for (size_t i = 0; i < text.size(); i += 2) {
        int high = digit(text[i]), low = digit(text[i + 1]);
        if (high < 0 || low < 0) return false;
        out[i / 2] = static_cast<uint8_t>(high << 4 | low);
    }
    return true;
}

void write_hex(const uint8_t* bytes, size_t count, std::string& out) {
    constexpr char kDigits[] = "0123456789abcdef";
    for (size_t i = 0; i < count; ++i) {
        out += kDigits[bytes[i] >> 4];
        out += kDigits[bytes[i] & 15];
    }
}

bool nothing(const uint8_t* bytes, size_t count) {
    return std::all_of(bytes, bytes + count, [](uint8_t b) { return b == 0; });
}

}  // namespace

std::optional<Trace> parse_traceparent(std::string_view value) {
    uint8_t version = 0, flags = 0;
    Trace trace;
    if (value.size() < kBytes || value[2] != '-' || value[35] != '-' || value[52] != '-' ||
        !read_hex(value.substr(0, 2), &version) || !read_hex(value.substr(3, 32), trace.trace_id) ||
        !read_hex(value.substr(36, 16), trace.parent_id) || !read_hex(value.substr(53, 2), &flags)) {
        return std::nullopt;
    }
    // Version 0 ends here; later ones may go on behind another '-'; 255 is forbidden.
    bool ends = value.size() == kBytes || (version > 0 && value[kBytes] == '-');
    if (version == 0xff || !ends || nothing(trace.trace_id, 16) || nothing(trace.parent_id, 8)) {
        return std::nullopt;
    }
    std::copy(trace.parent_id, trace.parent_id + 8, trace.span_id);
    trace.flags = flags & 1;  // the only one that the version written here knows
    return trace;
}

void write_traceparent(const Trace& trace, std::string& out) {
    out.reserve(out.size() + kBytes);
    out += "00-";
    write_hex(trace.trace_id, 16, out);
    out += '-';
    write_hex(trace.span_id, 8, out);
    out += '-';
    write_hex(&trace.flags, 1, out);
}

}  // namespace moonpool::relay
