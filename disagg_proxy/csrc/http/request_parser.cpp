#include "http/request_parser.hpp"

#include <algorithm>
#include <utility>

#include "base/move_view.hpp"
#include "http/octets.hpp"

namespace moonpool::http {

namespace {

constexpr size_t kMethodBytesMax = 24;
constexpr size_t kRequestIdBytesMax = 128;

// The client's id when it can be repeated in logs and heads: 1 to 128 visible ASCII characters.
std::string_view fit_request_id(std::string_view value) {
    bool fit = value.size() <= kRequestIdBytesMax && std::all_of(value.begin(), value.end(), is_visible);
    return fit ? value : std::string_view();
}

bool is_method(std::string_view text) {
    return !text.empty() && text.size() <= kMethodBytesMax &&
           std::all_of(text.begin(), text.end(), [](char c) { return (c >= 'A' && c <= 'Z') || c == '-'; });
}

// `http://host/path` and `/path` mean the same here; a fragment does not belong in a request. Empty: it is
// neither.
std::string_view origin_form(std::string_view target) {
    if (target == "*") return target;
    for (std::string_view scheme : {"http://", "https://"}) {
        if (!same_name(target.substr(0, scheme.size()), scheme)) continue;
        size_t path = target.find_first_of("/?#", scheme.size());
        if (path == scheme.size()) return {};  // no host
        // A host alone means its root: the slash of "://" stands for it, so that the view stays in the input.
        target = path == std::string_view::npos ? target.substr(scheme.size() - 1, 1) : target.substr(path);
        break;
    }
    if (target.empty() || target.front() != '/') return {};
    return target.substr(0, target.find('#'));
}

}  // namespace

void RequestHead::move_views(const char* from, const char* to) {
    for (std::string_view* view : {&method, &target, &path, &host, &request_id}) move_view(*view, from, to);
    for (Field& field : fields) {
        move_view(field.name, from, to);
        move_view(field.value, from, to);
    }
}

Refusal body_too_large(uint64_t body_bytes_max) {
    return {413, "body_too_large",
            "the request's body is larger than the limit of " + std::to_string(body_bytes_max) + " bytes"};
}

void RequestParser::reset() {
    lines_.restart(0);
    Fields keep = std::move(head_.fields);  // for its memory
    keep.clear();
    head_ = RequestHead();
    head_.fields = std::move(keep);
    refusal_ = Refusal();
}

Step RequestParser::parse(std::string_view input) {
    while (true) {
        switch (lines_.next(input)) {
            case HeadLines::Found::kNothing:
                return Step::kMore;
            case HeadLines::Found::kStartLine:
                if (!take_start_line(lines_.start_line(input))) return Step::kRefused;
                break;
            case HeadLines::Found::kBad:
                return refuse_garbage(lines_.why());
            case HeadLines::Found::kTooMany:
                return refuse_head("has more than the limit of " + std::to_string(HeadLines::kFieldsMax) +
                                   " fields");
            case HeadLines::Found::kTooLarge:
                return refuse_head("is larger than the limit of " + std::to_string(limits_.head_bytes_max) +
                                   " bytes");
            case HeadLines::Found::kEnd:
                head_.bytes = lines_.size();
                // The input may have moved since the start line came.
                if (!take_start_line(lines_.start_line(input))) return Step::kRefused;
                lines_.fields(input, head_.fields);
                return take_fields();
        }
    }
}

Step RequestParser::refuse_head(const std::string& why) {
    return refuse(431, "head_too_large", "the request's head " + why);
}

Step RequestParser::refuse(int status, const char* reason, std::string sentence) {
    refusal_ = {status, reason, std::move(sentence)};
    return Step::kRefused;
}

Step RequestParser::refuse_garbage(const char* why) {
    return refuse(400, "malformed", std::string("these bytes are no HTTP/1.1 request: ") + why);
}

// METHOD SP target SP HTTP/d.d
bool RequestParser::take_start_line(std::string_view line) {
    auto garbage = [&](const char* why) {
        refuse_garbage(why);
        return false;
    };
    auto other_version = [&](std::string_view version) {
        refuse(505, "http_version", "this proxy speaks HTTP/1.1, not HTTP/" + std::string(version));
        return false;
    };
    if (line == "PRI * HTTP/2.0") return other_version("2");  // how a connection of HTTP/2 begins
    size_t first = line.find(' ');
    if (first == std::string_view::npos || !is_method(line.substr(0, first)))
        return garbage("the first line is no request");
    size_t last = line.rfind(' ');
    std::string_view target = line.substr(first + 1, last == first ? last : last - first - 1);
    std::string_view version = last == first ? std::string_view() : line.substr(last + 1);
    if (target.find_first_of(" \t") != std::string_view::npos) return garbage("blanks in the target");
    if (!std::all_of(target.begin(), target.end(), is_visible)) return garbage("the target is not ASCII");
    if (version.empty() && last == first && target.starts_with('/')) return other_version("0.9");
    if (version.size() != 8 || !version.starts_with("HTTP/") || !is_digit(version[5]) || version[6] != '.' ||
        !is_digit(version[7]))
        return garbage("the first line does not end in a version");
    if (version[5] != '1' || version[7] > '1') return other_version(version.substr(5));
    target = origin_form(target);
    if (target.empty()) return garbage("the target is no path");
    head_.method = line.substr(0, first);
    head_.target = target;
    head_.path = target.substr(0, target.find('?'));
    head_.http_1_0 = version[7] == '0';
    return true;
}

Step RequestParser::take_fields() {
    size_t hosts = 0;
    bool expects_continue = false;
    head_.framing = Framing::kLength;
    for (Field& field : head_.fields) {
        field.forward = false;
        switch (field.kind) {
            case FieldKind::kHost:
                ++hosts;
                head_.host = field.value;
                break;
            case FieldKind::kContentLength: {
                int64_t length = length_of(field.value);
                if (head_.content_length >= 0 || length < 0)
                    return refuse(400, "malformed", "the request's Content-Length is no single number");
                head_.content_length = length;
                break;
            }
            case FieldKind::kTransferEncoding:
                if (head_.framing == Framing::kChunked || !same_name(field.value, "chunked"))
                    return refuse(501, "transfer_encoding",
                                  "the only Transfer-Encoding that is read here is chunked");
                head_.framing = Framing::kChunked;
                break;
            case FieldKind::kExpect:
                if (!same_name(field.value, "100-continue"))
                    return refuse(417, "expect", "the only Expect that is understood here is 100-continue");
                expects_continue = true;
                break;
            case FieldKind::kRequestId:
                head_.request_id = fit_request_id(field.value);
                break;
            case FieldKind::kConnection:
            case FieldKind::kHopByHop:
                break;
            case FieldKind::kContentType:
            case FieldKind::kOther:
                field.forward = true;
                break;
        }
    }
    bool close = false;
    if (!apply_connection(head_.fields, close))
        return refuse(400, "malformed", "the request's Connection names too many fields");
    if (head_.framing == Framing::kChunked && head_.content_length >= 0)
        return refuse(400, "malformed", "the request has both a Content-Length and a Transfer-Encoding");
    if (hosts > 1 || (hosts == 0 && !head_.http_1_0))
        return refuse(400, "malformed", "the request needs exactly one Host field");
    head_.keep_alive = !head_.http_1_0 && !close;
    head_.expects_continue = expects_continue && !head_.http_1_0;
    if (head_.content_length > 0 && static_cast<uint64_t>(head_.content_length) > limits_.body_bytes_max) {
        refusal_ = body_too_large(limits_.body_bytes_max);
        return Step::kRefused;
    }
    return Step::kDone;
}

}  // namespace moonpool::http
