#include "http/body_reader.hpp"

#include <algorithm>

namespace moonpool::http {

BodyReader::BodyReader(Framing framing, int64_t length)
    : framing_(framing),
      left_(framing == Framing::kLength && length > 0 ? static_cast<uint64_t>(length) : 0) {
    done_ = framing == Framing::kLength && left_ == 0;
}

BodyReader::Piece BodyReader::take(std::string_view input) {
    Piece piece;
    if (done_ || failed()) return piece;
    if (framing_ == Framing::kChunked) {
        piece.taken = chunks_.take(input, piece.content);
        done_ = chunks_.done();
    } else {
        piece.content = framing_ == Framing::kLength ? input.substr(0, left_) : input;
        piece.taken = piece.content.size();
        if (framing_ == Framing::kLength) done_ = (left_ -= piece.taken) == 0;
    }
    note(piece.content);
    return piece;
}

void BodyReader::take_all(std::string_view input, std::string& content) {
    while (!input.empty()) {
        Piece piece = take(input);
        content.append(piece.content);
        input.remove_prefix(piece.taken);
        if (piece.taken == 0) break;
    }
}

std::string_view BodyReader::pass(std::string_view input) {
    size_t at = 0;
    while (at < input.size()) {
        Piece piece = take(input.substr(at));
        if (piece.taken == 0) break;
        at += piece.taken;
    }
    return input.substr(0, at);
}

bool BodyReader::finish() {
    if (framing_ == Framing::kUntilClose) done_ = true;
    return done_;
}

bool BodyReader::between_events() const {
    if (framing_ == Framing::kLength || failed()) return false;
    if (framing_ == Framing::kChunked && !chunks_.between_chunks()) return false;
    if (content_bytes_ == 0) return true;
    return tail_[2] == '\n' && (tail_[1] == '\n' || (tail_[1] == '\r' && tail_[0] == '\n'));
}

void BodyReader::note(std::string_view content) {
    content_bytes_ += content.size();
    size_t from_new = std::min(content.size(), tail_.size());
    std::move(tail_.begin() + from_new, tail_.end(), tail_.begin());
    std::copy(content.end() - from_new, content.end(), tail_.end() - from_new);
}

}  // namespace moonpool::http
