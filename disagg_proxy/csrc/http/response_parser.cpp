#include "http/response_parser.hpp"

#include <string>
#include <utility>

#include "base/move_view.hpp"
#include "http/octets.hpp"

namespace moonpool::http {

void ResponseHead::move_views(const char* from, const char* to) {
    move_view(phrase, from, to);
    for (Field& field : fields) {
        move_view(field.name, from, to);
        move_view(field.value, from, to);
    }
}

void ResponseParser::begin(bool head_only) {
    head_only_ = head_only;
    lines_.restart(0);
    Fields keep = std::move(head_.fields);  // for its memory
    keep.clear();
    head_ = ResponseHead();
    head_.fields = std::move(keep);
    refusal_ = Refusal();
}

Step ResponseParser::parse(std::string_view input) {
    while (true) {
        switch (lines_.next(input)) {
            case HeadLines::Found::kNothing:
                return Step::kMore;
            case HeadLines::Found::kStartLine:
                if (!take_start_line(lines_.start_line(input))) return Step::kRefused;
                break;
            case HeadLines::Found::kBad:
                return refuse(std::string("its bytes are no HTTP answer: ") + lines_.why());
            case HeadLines::Found::kTooMany:
                return refuse("its head has more than " + std::to_string(HeadLines::kFieldsMax) + " fields");
            case HeadLines::Found::kTooLarge:
                return refuse("its head is larger than " + std::to_string(head_bytes_max_) + " bytes");
            case HeadLines::Found::kEnd:
                if (head_.status < 200) {  // interim: the answer is yet to come
                    lines_.restart(lines_.size());
                    break;
                }
                head_.bytes = lines_.size();
                // The input may have moved since the start line came.
                if (!take_start_line(lines_.start_line(input))) return Step::kRefused;
                lines_.fields(input, head_.fields);
                return take_fields();
        }
    }
}

Step ResponseParser::refuse(std::string sentence) {
    refusal_ = {502, "bad_answer", std::move(sentence)};
    return Step::kRefused;
}

// HTTP/1.d SP ddd [SP phrase]
bool ResponseParser::take_start_line(std::string_view line) {
    bool sound = line.size() >= 12 && line.starts_with("HTTP/1.") && (line[7] == '0' || line[7] == '1') &&
                 line[8] == ' ' && line[9] >= '1' && line[9] <= '5' && is_digit(line[10]) &&
                 is_digit(line[11]) && (line.size() == 12 || line[12] == ' ');
    if (!sound) {
        refuse("its first line is no answer of HTTP/1.1");
        return false;
    }
    http_1_0_ = line[7] == '0';
    head_.status = (line[9] - '0') * 100 + (line[10] - '0') * 10 + (line[11] - '0');
    head_.phrase = line.size() > 13 ? line.substr(13) : std::string_view();
    if (head_.status == 101) {
        refuse("it switched protocols without a request to");
        return false;
    }
    return true;
}

Step ResponseParser::take_fields() {
    int64_t length = -1;
    bool chunked = false;
    for (Field& field : head_.fields) {
        switch (field.kind) {
            case FieldKind::kContentLength:
                if (length >= 0 || (length = length_of(field.value)) < 0)
                    return refuse("its Content-Length is no single number");
                break;
            case FieldKind::kTransferEncoding:
                if (chunked || !same_name(field.value, "chunked"))
                    return refuse("it has a Transfer-Encoding other than chunked");
                chunked = true;
                field.forward = false;
                break;
            case FieldKind::kContentType:
                head_.event_stream = same_name(field.value.substr(0, 17), "text/event-stream");
                break;
            case FieldKind::kConnection:
            case FieldKind::kHopByHop:
            case FieldKind::kRequestId:
                field.forward = false;
                break;
            case FieldKind::kHost:
            case FieldKind::kExpect:
            case FieldKind::kOther:
                break;
        }
    }
    if (chunked && length >= 0) return refuse("it has both a Content-Length and a Transfer-Encoding");
    bool close = false;
    if (!apply_connection(head_.fields, close)) return refuse("its Connection names too many fields");
    bool bodiless = head_only_ || head_.status == 204 || head_.status == 304;
    if (bodiless || length >= 0) {
        head_.framing = Framing::kLength;
        head_.content_length = bodiless ? 0 : length;
    } else {
        head_.framing = chunked ? Framing::kChunked : Framing::kUntilClose;
    }
    head_.keep_alive = !http_1_0_ && !close && head_.framing != Framing::kUntilClose;
    return Step::kDone;
}

}  // namespace moonpool::http
