// Cuts the bytes of a head into lines and fields while they arrive: the part that requests and answers share.
//
// Strict (docs/proxy.md): lines end in CRLF only, a line never goes on in the next one, a name is a token
// that stands right before its colon, no control character but the tab. A byte that can be in no head is
// found as soon as it is there, not when the head ends, so TLS or a binary protocol on the port is refused at
// once. Every byte is looked at once, however small the pieces.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "http/fields.hpp"

namespace moonpool::http {

class HeadLines {
   public:
    static constexpr size_t kFieldsMax = 256;

    enum class Found {
        kNothing,    // the next line is not whole
        kStartLine,  // line() is the first line that is not blank
        kEnd,        // the blank line; size() is known, fields are whole
        kBad,        // why() says what is wrong
        kTooMany,    // more than kFieldsMax fields
        kTooLarge,   // more than bytes_max bytes, and nothing behind them was looked at
    };

    explicit HeadLines(size_t bytes_max) : bytes_max_(bytes_max) {}

    // input: all bytes since the head's first, each time; they may have moved in between.
    Found next(std::string_view input);

    // The start line in `input`; valid from kStartLine on.
    std::string_view start_line(std::string_view input) const { return input.substr(start_at_, start_size_); }

    // The fields, as views into `input`; after kEnd. Known kinds are set, `forward` is not decided yet.
    void fields(std::string_view input, Fields& out) const;

    // Offset behind what was looked at; after kEnd: behind the blank line.
    size_t size() const { return scanned_; }
    // Something that is no blank line has begun.
    bool begun() const { return started_ || scanned_ > line_at_; }
    const char* why() const { return why_; }

    // Begin anew `at` bytes into the same input (behind an interim answer).
    void restart(size_t at);

   private:
    struct Span {
        uint32_t name_at, name_size, value_at, value_size;
        FieldKind kind;
    };

    bool take_field(std::string_view line, size_t at);

    size_t bytes_max_;
    std::vector<Span> spans_;
    size_t line_at_ = 0;  // where the line under way begins
    size_t scanned_ = 0;  // everything before was looked at
    size_t start_at_ = 0, start_size_ = 0;
    bool started_ = false;
    const char* why_ = "";
};

}  // namespace moonpool::http
