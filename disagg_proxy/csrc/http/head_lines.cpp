#include "http/head_lines.hpp"

#include "http/octets.hpp"

#ifdef __SSE2__
#include <emmintrin.h>

#include <bit>
#endif

namespace moonpool::http {

namespace {

// The first control character (the tab is none) at or behind `at`, or `end`.
const char* find_control(const char* at, const char* end) {
#ifdef __SSE2__
    const __m128i highest = _mm_set1_epi8(0x1F), tab = _mm_set1_epi8('\t'), del = _mm_set1_epi8(0x7F);
    for (; end - at >= 16; at += 16) {
        __m128i octets = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        __m128i low = _mm_cmpeq_epi8(_mm_min_epu8(octets, highest), octets);
        __m128i bad =
            _mm_or_si128(_mm_andnot_si128(_mm_cmpeq_epi8(octets, tab), low), _mm_cmpeq_epi8(octets, del));
        if (auto mask = static_cast<unsigned>(_mm_movemask_epi8(bad))) return at + std::countr_zero(mask);
    }
#endif
    while (at != end && !is_control(*at)) ++at;
    return at;
}

bool is_blank(char c) { return c == ' ' || c == '\t'; }

}  // namespace

HeadLines::Found HeadLines::next(std::string_view input) {
    const Found wait = input.size() > bytes_max_ ? Found::kTooLarge : Found::kNothing;
    // One byte more shows that the head goes beyond its limit.
    input = input.substr(0, bytes_max_ + 1);
    while (true) {
        const char* end = input.data() + input.size();
        const char* found = find_control(input.data() + scanned_, end);
        scanned_ = static_cast<size_t>(found - input.data());
        if (found == end) return wait;
        if (*found != '\r') {
            why_ = *found == '\n' ? "a line does not end in CRLF" : "a control character";
            return Found::kBad;
        }
        if (found + 1 == end) return wait;
        if (found[1] != '\n') {
            why_ = "a carriage return without its line feed";
            return Found::kBad;
        }
        std::string_view line = input.substr(line_at_, scanned_ - line_at_);
        size_t at = line_at_;
        line_at_ = scanned_ += 2;
        if (!started_) {
            if (line.empty()) continue;
            started_ = true;
            start_at_ = at;
            start_size_ = line.size();
            return Found::kStartLine;
        }
        if (line.empty()) return scanned_ > bytes_max_ ? Found::kTooLarge : Found::kEnd;
        if (spans_.size() == kFieldsMax) return Found::kTooMany;
        if (!take_field(line, at)) return Found::kBad;
    }
}

bool HeadLines::take_field(std::string_view line, size_t at) {
    size_t name = 0;
    while (name < line.size() && is_token_octet(line[name])) ++name;
    if (name == 0 || name == line.size() || line[name] != ':') {
        why_ = is_blank(line[0]) ? "a field's line goes on in the next one" : "a line is no field";
        return false;
    }
    size_t first = name + 1, last = line.size();
    while (first < last && is_blank(line[first])) ++first;
    while (last > first && is_blank(line[last - 1])) --last;
    spans_.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(name),
                      static_cast<uint32_t>(at + first), static_cast<uint32_t>(last - first),
                      kind_of(line.substr(0, name))});
    return true;
}

void HeadLines::fields(std::string_view input, Fields& out) const {
    out.clear();
    for (const Span& span : spans_) {
        out.push_back({input.substr(span.name_at, span.name_size),
                       input.substr(span.value_at, span.value_size), span.kind, true});
    }
}

void HeadLines::restart(size_t at) {
    spans_.clear();
    line_at_ = scanned_ = at;
    start_at_ = start_size_ = 0;
    started_ = false;
    why_ = "";
}

}  // namespace moonpool::http
