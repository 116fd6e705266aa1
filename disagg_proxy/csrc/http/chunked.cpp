#include "http/chunked.hpp"

#include <algorithm>

#include "http/octets.hpp"

namespace moonpool::http {

namespace {

int hex_digit(char c) {
    if (is_digit(c)) return c - '0';
    char letter = lower(c);
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

}  // namespace

size_t ChunkedReader::take(std::string_view input, std::string_view& content) {
    content = {};
    size_t at = 0;
    while (at < input.size() && !done() && !failed()) {
        if (state_ == State::kData) {
            content = input.substr(at, left_);
            left_ -= content.size();
            if (left_ == 0) state_ = State::kEnd;
            return at + content.size();
        }
        if (!take_framing(input[at])) break;
        ++at;
    }
    return at;
}

bool ChunkedReader::take_framing(char octet) {
    if (cr_ != (octet == '\n')) {
        why_ = "a line of it does not end in CRLF";
        return false;
    }
    if (cr_) {
        cr_ = false;
        end_line();
        return true;
    }
    ++line_bytes_;
    if (octet == '\r') {
        if (state_ == State::kLine && digits_ == 0) why_ = "a chunk has no size";
        if (state_ == State::kTrailer && line_bytes_ > 1 && !free_) why_ = "a trailer is no field";
        cr_ = true;
    } else if (is_control(octet) && !(state_ == State::kLine && !free_)) {
        why_ = "a control character in a line of it";
    } else if (state_ == State::kEnd) {
        why_ = "a chunk is longer than its size line says";
    } else if (line_bytes_ > kLineBytesMax) {
        why_ = "a line of it is longer than 1024 bytes";
    } else if (state_ == State::kTrailer) {
        if (++trailer_bytes_ > kTrailerBytesMax)
            why_ = "its trailers are longer than 8192 bytes";
        else if (!free_ && octet == ':' && line_bytes_ > 1)
            free_ = true;
        else if (!free_ && !is_token_octet(octet))
            why_ = "a trailer is no field";
    } else if (!free_) {
        take_size(octet);
    }
    return why_ == nullptr;
}

// A character of a size line before any extension.
void ChunkedReader::take_size(char octet) {
    int digit = hex_digit(octet);
    if (octet == ';' && digits_ > 0) {
        free_ = true;
    } else if (digit < 0 || digits_ == kDigitsMax) {
        why_ = "a chunk's size is no hexadecimal number";
    } else {
        ++digits_;
        left_ = left_ * 16 + static_cast<uint64_t>(digit);
    }
}

void ChunkedReader::end_line() {
    if (state_ == State::kLine) {
        state_ = left_ > 0 ? State::kData : State::kTrailer;
    } else if (state_ == State::kEnd) {
        state_ = State::kLine;
    } else if (line_bytes_ == 1) {  // a trailer line of nothing but its CR
        state_ = State::kDone;
    } else {
        trailer_bytes_ += 2;
    }
    line_bytes_ = 0;
    digits_ = 0;
    free_ = false;
}

}  // namespace moonpool::http
