// Checks and skips JSON without making values of it: one pass, no allocation, any thread. Bodies are
// untrusted; every read is preceded by a look at end_, and depth is bounded by the caller. Strings are the
// bulk of a request, and lists of token ids the rest: both have a fast path, and the slow path behind it
// decides everything that is unusual, so that the two can never disagree.
#include "json/text.hpp"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>
#include <cstring>

#include "json/digits.hpp"

#ifdef __SSE2__
#include <emmintrin.h>

#include <bit>
#endif

namespace moonpool::json {

namespace {

bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Ends a run of plain characters of a string: its quote, an escape, or a control character, which is
// forbidden.
bool is_special(char c) { return c == '"' || c == '\\' || static_cast<uint8_t>(c) < 0x20; }

// What may stand behind a backslash, but for u.
constexpr std::array<bool, 256> kEscapes = [] {
    std::array<bool, 256> table = {};
    for (char escape : std::string_view("\"\\/bfnrt")) table[static_cast<uint8_t>(escape)] = true;
    return table;
}();

bool is_escape(char c) { return kEscapes[static_cast<uint8_t>(c)]; }

#ifdef __SSE2__
constexpr ptrdiff_t kBlock = 64;

// min(octet, 0x1F) == octet finds the control characters; SSE2 has no unsigned comparison.
uint64_t specials_16(const char* at) {
    __m128i octets = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(octets, _mm_set1_epi8(0x1F)), octets);
    __m128i special = _mm_or_si128(control, _mm_or_si128(_mm_cmpeq_epi8(octets, _mm_set1_epi8('"')),
                                                         _mm_cmpeq_epi8(octets, _mm_set1_epi8('\\'))));
    return static_cast<uint64_t>(_mm_movemask_epi8(special));
}

// A bit for each special character of the next 64.
uint64_t specials_64(const char* at) {
    return specials_16(at) | specials_16(at + 16) << 16 | specials_16(at + 32) << 32 |
           specials_16(at + 48) << 48;
}
#endif

}  // namespace

bool Text::skip_string(bool& escaped) {
    escaped = false;
    if (!take('"')) return fail("a string is expected");
#ifdef __SSE2__
    // Long strings in blocks. An escape may reach into the next block: that one then begins behind it.
    while (end_ - at_ >= kBlock) {
        const char* block = at_;
        const char* behind = block + kBlock;
        // The bits that are left name special characters of this block that no escape has consumed.
        for (uint64_t specials = specials_64(block); specials != 0;) {
            int i = std::countr_zero(specials);
            const char* at = block + i;
            if (*at == '"') {
                at_ = at + 1;
                return true;
            }
            escaped = true;
            if (*at == '\\' && end_ - at >= 2 && is_escape(at[1])) {  // nearly all of them
                // Both characters of the escape: the second may be a quote or a backslash, which is not
                // special then.
                specials &= ~(uint64_t{3} << i);
                if (i == kBlock - 1) ++behind;
                continue;
            }
            at_ = at;
            if (!skip_escape()) return false;
            behind = std::max(behind, at_);
            // A \u escape that reaches beyond the block: `behind` says where the next one begins.
            if (at_ - block >= kBlock) break;
            specials &= ~uint64_t{0} << (at_ - block);
        }
        at_ = behind;
    }
#endif
    while (true) {
        while (!at_end() && !is_special(*at_)) ++at_;
        if (take('"')) return true;
        if (at_end()) return fail("a string does not end");
        escaped = true;
        if (!skip_escape()) return false;
    }
}

// \x or \u and four digits.
bool Text::skip_escape() {
    if (*at_ != '\\') return fail("a control character in a string");
    if (end_ - at_ < 2) return fail("a string does not end");
    char kind = at_[1];
    if (kind == 'u') {
        if (end_ - at_ < 6) return fail("a string does not end");
        if (!is_hex(at_[2]) || !is_hex(at_[3]) || !is_hex(at_[4]) || !is_hex(at_[5]))
            return fail("an escape of a string is no \\u with four digits");
        at_ += 6;
        return true;
    }
    if (!is_escape(kind)) return fail("an unknown escape in a string");
    at_ += 2;
    return true;
}

// `first` is taken before the quote is known to be there: it is used only if skip_string() succeeded.
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
            // An empty container ends in the loop below; one that is not empty goes on with its first
            // value.
            bool empty = at_ != end_ && *at_ == (object ? '}' : ']');
            if (!empty) {
                if (object && !skip_key(key, escaped)) return false;
                if (!object) skip_short_integers();
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
                if (!object) skip_short_integers();
                break;
            }
            if (!take(object ? '}' : ']')) return fail("a comma or the end of a container is expected");
            --depth;
        }
    } while (depth > 0);
    return true;
}

// As many "integer," as there are of up to seven digits, for lists of token ids; stops before the next value,
// which may be anything.
void Text::skip_short_integers() {
    while (end_ - at_ >= kWordBytes) {
        // Eight bytes: up to seven digits and the comma. A leading zero is left to skip_number(), which
        // refuses it.
        uint64_t word = load_word(at_);
        unsigned digits = digits_in(word);
        if (digits == 0 || digits == kWordBytes || at_[digits] != ',' || (*at_ == '0' && digits > 1)) break;
        at_ += digits + 1;
        if (!at_end() && *at_ == ' ') ++at_;
    }
    skip_blanks();
}

// The grammar of RFC 8259: no leading zero, no plus, digits behind a point and in an exponent. The value is
// not computed.
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
