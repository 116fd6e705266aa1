// Makes values of spans that Text has checked: escapes are known to be complete, containers to be closed,
// numbers to be well formed. So these functions look for what they want, not for errors, and return nothing
// for a value of another kind. Pure; any thread.
#include "json/values.hpp"

#include <charconv>
#include <limits>

#include "json/digits.hpp"
#include "json/text.hpp"

namespace moonpool::json {

namespace {

// Also for a lone surrogate, which gives its three bytes (string_of in the header says why).
void append_utf8(std::string& out, uint32_t point) {
    auto put = [&](uint32_t octet) { out.push_back(static_cast<char>(octet)); };
    if (point < 0x80) {
        put(point);
    } else if (point < 0x800) {
        put(0xC0 | point >> 6);
        put(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
        put(0xE0 | point >> 12);
        put(0x80 | (point >> 6 & 0x3F));
        put(0x80 | (point & 0x3F));
    } else {
        put(0xF0 | point >> 18);
        put(0x80 | (point >> 12 & 0x3F));
        put(0x80 | (point >> 6 & 0x3F));
        put(0x80 | (point & 0x3F));
    }
}

// The number of `\uXXXX` at the front of raw; -1 when there is none.
int32_t unit_of(std::string_view raw) {
    uint32_t unit = 0;
    if (raw.size() < 6 || raw[0] != '\\' || raw[1] != 'u') return -1;
    std::from_chars(raw.data() + 2, raw.data() + 6, unit, 16);
    return static_cast<int32_t>(unit);
}

// Appends what the escape at the front of raw stands for; returns its size. A pair of surrogates is one
// escape.
size_t append_escape(std::string& out, std::string_view raw) {
    switch (raw[1]) {
        case 'u': {
            auto unit = static_cast<uint32_t>(unit_of(raw));
            int32_t low = unit >= 0xD800 && unit < 0xDC00 ? unit_of(raw.substr(6)) : -1;
            // No pair: unit_of() gave -1, or another character follows.
            if (low < 0xDC00 || low > 0xDFFF) {
                append_utf8(out, unit);
                return 6;
            }
            append_utf8(out, 0x10000 + (unit - 0xD800) * 0x400 + (static_cast<uint32_t>(low) - 0xDC00));
            return 12;
        }
        case 'b':
            out.push_back('\b');
            return 2;
        case 'f':
            out.push_back('\f');
            return 2;
        case 'n':
            out.push_back('\n');
            return 2;
        case 'r':
            out.push_back('\r');
            return 2;
        case 't':
            out.push_back('\t');
            return 2;
        default:
            out.push_back(raw[1]);
            return 2;
    }
}

std::string_view content_of(const Member& member) { return member.value.substr(1, member.value.size() - 2); }

void skip_blanks(std::string_view& text) {
    size_t blanks = 0;
    while (blanks < text.size() && static_cast<uint8_t>(text[blanks]) <= ' ') ++blanks;
    text.remove_prefix(blanks);
}

bool take(std::string_view& text, char c) {
    if (!text.starts_with(c)) return false;
    text.remove_prefix(1);
    skip_blanks(text);
    return true;
}

// Digits alone; what no token id can be (a sign, a point, another kind of value) has none here, or leaves
// something behind that is neither a comma nor the end.
bool take_token_id(std::string_view& text, uint32_t& id) {
    const char* at = text.data();
    const char* end = at + text.size();
    uint64_t number = 0;
    // The bound is checked in the loop, so that a number of a thousand digits ends after eleven.
    while (at != end && is_digit(*at) && number <= std::numeric_limits<uint32_t>::max())
        number = number * 10 + static_cast<uint64_t>(*at++ - '0');
    if (at == text.data() || number > std::numeric_limits<uint32_t>::max()) return false;
    id = static_cast<uint32_t>(number);
    text.remove_prefix(static_cast<size_t>(at - text.data()));
    skip_blanks(text);
    return true;
}

// As many "id," as there are of up to seven digits: nearly all.
// Eight bytes at a time: an id of up to seven digits and its comma. Whatever does not fit this form is left
// for take_token_id(), which decides.
void take_short_token_ids(std::string_view& text, std::vector<uint32_t>& out) {
    const char* at = text.data();
    const char* end = at + text.size();
    while (end - at >= kWordBytes) {
        uint64_t word = load_word(at);
        unsigned digits = digits_in(word);
        if (digits == 0 || digits == kWordBytes || at[digits] != ',') break;
        out.push_back(number_in(word, digits));
        at += digits + 1;
        if (at != end && *at == ' ') ++at;
    }
    text.remove_prefix(static_cast<size_t>(at - text.data()));
    skip_blanks(text);
}

// Behind the opening bracket, up to behind the closing one.
bool take_token_ids(std::string_view& text, std::vector<uint32_t>& out) {
    while (true) {
        uint32_t id = 0;
        take_short_token_ids(text, out);
        if (!take_token_id(text, id)) return false;
        out.push_back(id);
        if (take(text, ']')) return true;
        if (!take(text, ',')) return false;
    }
}

// `take(element)` for each, until it says false. False: it did, or this is no array.
template <class Take>
// The scanner has accepted the array, so a comma may be taken wherever one can stand.
bool walk_array(std::string_view array, Take take) {
    Text text(array);
    if (!text.take('[')) return false;
    text.skip_blanks();
    while (!text.take(']')) {
        const char* first = text.at();
        Kind kind = Kind::kNull;
        bool escaped = false;
        if (!text.skip_value(kind, escaped, kDepthMax - 1)) return false;
        if (!take(std::string_view(first, static_cast<size_t>(text.at() - first)))) return false;
        text.skip_blanks();
        text.take(',');
        text.skip_blanks();
    }
    return true;
}

}  // namespace

// Runs without a backslash are appended whole; most strings are one such run.
void append_resolved(std::string& out, std::string_view raw) {
    while (!raw.empty()) {
        size_t plain = raw.find('\\');
        out.append(raw.substr(0, plain));
        if (plain == std::string_view::npos) return;
        raw.remove_prefix(plain);
        raw.remove_prefix(append_escape(out, raw));
    }
}

std::optional<int64_t> integer_of(const Member& member) {
    if (member.kind != Kind::kInteger) return std::nullopt;
    int64_t number = 0;
    const char* end = member.value.data() + member.value.size();
    // A number beyond 64 bits is no integer for any caller here.
    if (std::from_chars(member.value.data(), end, number).ec != std::errc()) return std::nullopt;
    return number;
}

std::optional<bool> bool_of(const Member& member) {
    if (member.kind == Kind::kTrue) return true;
    if (member.kind == Kind::kFalse) return false;
    return std::nullopt;
}

std::optional<std::string> string_of(const Member& member) {
    if (member.kind != Kind::kString) return std::nullopt;
    std::string out;
    out.reserve(member.value.size());
    append_resolved(out, content_of(member));
    return out;
}

std::string_view string_of(const Member& member, std::string& scratch) {
    if (!member.value_escaped) return content_of(member);
    scratch.clear();
    append_resolved(scratch, content_of(member));
    return scratch;
}

void append_string(std::string& out, std::string_view text) {
    // Every control character as \u00XX: valid JSON, and one rule for all of them. Other bytes stay as they
    // are, so UTF-8 passes.
    constexpr char kHex[] = "0123456789abcdef";
    out.push_back('"');
    for (char c : text) {
        auto octet = static_cast<uint8_t>(c);
        if (octet >= 0x20 && c != '"' && c != '\\') {
            out.push_back(c);
        } else if (octet >= 0x20) {
            out.append({'\\', c});
        } else {
            out.append({'\\', 'u', '0', '0', kHex[octet >> 4], kHex[octet & 15]});
        }
    }
    out.push_back('"');
}

bool token_ids_of(const Member& member, std::vector<uint32_t>& out) {
    out.clear();
    if (member.kind != Kind::kArray) return false;
    std::string_view text = member.value;
    out.reserve(text.size() / 6);  // nearly all ids have five digits or less
    take(text, '[');
    // A list of prompts with one prompt in it is that prompt. With several, `text` is not empty at the end.
    bool nested = take(text, '[');
    bool sound = take_token_ids(text, out) && (!nested || take(text, ']')) && text.empty();
    // Half an array is no answer: callers look at `out` alone.
    if (!sound) out.clear();
    return sound;
}

bool elements_of(std::string_view array, std::vector<std::string_view>& out) {
    out.clear();
    bool sound = walk_array(array, [&](std::string_view element) {
        out.push_back(element);
        return true;
    });
    if (!sound) out.clear();
    return sound;
}

// `most` bounds the work: a list of a million prompts is refused after the first few.
size_t count_elements(std::string_view array, size_t most) {
    size_t count = 0;
    bool sound = walk_array(array, [&](std::string_view) { return ++count <= most; });
    return sound || count > most ? count : 0;
}

}  // namespace moonpool::json
