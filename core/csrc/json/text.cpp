#include "json/text.hpp"

#include <bitset>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>

#include <bit>
#endif

namespace moonpool::json {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Ends a run of plain characters of a string: its quote, an escape, or a control character, which is
// forbidden.
bool is_special(char c) { return c == '"' || c == '\\' || static_cast<uint8_t>(c) < 0x20; }

#ifdef __SSE2__
__m128i specials(const char* at) {
    __m128i octets = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(octets, _mm_set1_epi8(0x1F)), octets);
    return _mm_or_si128(control, _mm_or_si128(_mm_cmpeq_epi8(octets, _mm_set1_epi8('"')),
                                              _mm_cmpeq_epi8(octets, _mm_set1_epi8('\\'))));
}
#endif

// The first special character at or behind `at`, or `end`.
const char* find_special(const char* at, const char* end) {
#ifdef __SSE2__
    // Short strings end in the first 16 bytes; long ones are walked over 64 bytes at a time.
    for (bool wide = false; end - at >= 16; at += 16) {
        while (wide && end - at >= 64) {
            __m128i any = _mm_or_si128(_mm_or_si128(specials(at), specials(at + 16)),
                                       _mm_or_si128(specials(at + 32), specials(at + 48)));
            if (_mm_movemask_epi8(any) != 0) break;
            at += 64;
        }
        if (end - at < 16) break;
        if (auto mask = static_cast<unsigned>(_mm_movemask_epi8(specials(at))))
            return at + std::countr_zero(mask);
        wide = true;
    }
#endif
    while (at != end && !is_special(*at)) ++at;
    return at;
}

}  // namespace

bool Text::skip_string(bool& escaped) {
    escaped = false;
    if (!take('"')) return fail("a string is expected");
    while (true) {
        at_ = find_special(at_, end_);
        if (take('"')) return true;
        if (at_end()) return fail("a string does not end");
        if (*at_ != '\\') return fail("a control character in a string");
        escaped = true;
        if (!skip_escape()) return false;
    }
}

// \x or \u and four digits.
bool Text::skip_escape() {
    if (end_ - at_ < 2) return fail("a string does not end");
    char kind = at_[1];
    if (kind == 'u') {
        if (end_ - at_ < 6) return fail("a string does not end");
        if (!is_hex(at_[2]) || !is_hex(at_[3]) || !is_hex(at_[4]) || !is_hex(at_[5]))
            return fail("an escape of a string is no \\u with four digits");
        at_ += 6;
        return true;
    }
    if (kind == '\0' || std::strchr("\"\\/bfnrt", kind) == nullptr)
        return fail("an unknown escape in a string");
    at_ += 2;
    return true;
}

bool Text::skip_key(std::string_view& key, bool& escaped) {
    const char* first = at_ + 1;
    if (!skip_string(escaped)) return false;
    key = std::string_view(first, static_cast<size_t>(at_ - first) - 1);
    skip_blanks();
    if (!take(':')) return fail("a colon is expected behind a key");
    skip_blanks();
    return true;
}

bool Text::skip_value(Kind& kind, bool& escaped, size_t depth_max) {
    escaped = false;
    if (at_end()) return fail("a value is expected");
    if (*at_ != '{' && *at_ != '[') return skip_scalar(kind, escaped);
    kind = *at_ == '{' ? Kind::kObject : Kind::kArray;
    return skip_container(depth_max);
}

bool Text::skip_scalar(Kind& kind, bool& escaped) {
    if (at_end()) return fail("a value is expected");
    switch (*at_) {
        case '"':
            kind = Kind::kString;
            return skip_string(escaped);
        case 't':
            kind = Kind::kTrue;
            return skip_word("true");
        case 'f':
            kind = Kind::kFalse;
            return skip_word("false");
        case 'n':
            kind = Kind::kNull;
            return skip_word("null");
        default:
            return skip_number(kind);
    }
}

// No recursion, so that depth costs a bit and not a stack frame. in_object[d]: the container at depth d is an
// object. The inner loop runs behind a value: it closes what ends there, then takes the comma before the
// next.
bool Text::skip_container(size_t depth_max) {
    std::bitset<kDepthMax> in_object;
    size_t depth = 0;
    std::string_view key;
    Kind kind;
    bool escaped;
    do {
        if (at_ != end_ && (*at_ == '{' || *at_ == '[')) {
            if (depth == depth_max) return fail("values nest too deep");
            bool object = *at_++ == '{';
            in_object[depth++] = object;
            skip_blanks();
            bool empty = at_ != end_ && *at_ == (object ? '}' : ']');
            if (!empty) {
                if (object && !skip_key(key, escaped)) return false;
                continue;
            }
        } else if (!skip_scalar(kind, escaped)) {
            return false;
        }
        while (depth > 0) {
            skip_blanks();
            bool object = in_object[depth - 1];
            if (take(',')) {
                skip_blanks();
                if (object && !skip_key(key, escaped)) return false;
                break;
            }
            if (!take(object ? '}' : ']')) return fail("a comma or the end of a container is expected");
            --depth;
        }
    } while (depth > 0);
    return true;
}

bool Text::skip_number(Kind& kind) {
    kind = Kind::kInteger;
    take('-');
    if (at_end() || !is_digit(*at_)) return fail("a value is expected");
    if (!take('0')) skip_digits();
    if (take('.')) {
        kind = Kind::kReal;
        if (!skip_digits()) return fail("a number ends in a point");
    }
    if (take('e') || take('E')) {
        kind = Kind::kReal;
        if (!take('+')) take('-');
        if (!skip_digits()) return fail("a number ends in its exponent's sign");
    }
    return true;
}

bool Text::skip_digits() {
    const char* first = at_;
    while (at_ != end_ && is_digit(*at_)) ++at_;
    return at_ != first;
}

bool Text::skip_word(std::string_view word) {
    if (static_cast<size_t>(end_ - at_) < word.size() || std::memcmp(at_, word.data(), word.size()) != 0)
        return fail("a value is expected");
    at_ += word.size();
    return true;
}

}  // namespace moonpool::json
