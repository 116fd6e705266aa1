#include "http/head_writer.hpp"

#include <charconv>

#include "json/values.hpp"

namespace moonpool::http {

namespace {

struct Phrase {
    int status;
    std::string_view text;
};

// The statuses that the proxy or one of its callers answers with.
constexpr Phrase kPhrases[] = {
    {200, "OK"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {413, "Content Too Large"},
    {415, "Unsupported Media Type"},
    {417, "Expectation Failed"},
    {422, "Unprocessable Content"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {502, "Bad Gateway"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
    {505, "HTTP Version Not Supported"},
};

void append_number(std::string& out, uint64_t number, int base = 10) {
    char digits[20];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, number, base).ptr);
}

void append_field(std::string& out, std::string_view name, std::string_view value) {
    out.append(name).append(": ").append(value).append("\r\n");
}

void append_length(std::string& out, uint64_t length) {
    out.append("Content-Length: ");
    append_number(out, length);
    out.append("\r\n");
}

void append_forwarded(std::string& out, const Fields& fields) {
    for (const Field& field : fields) {
        if (field.forward) append_field(out, field.name, field.value);
    }
}

void append_own(std::string& out, std::span<const OwnField> fields) {
    for (const OwnField& field : fields) append_field(out, field.name, field.value);
}

void append_status_line(std::string& out, int status, std::string_view phrase) {
    out.append("HTTP/1.1 ");
    append_number(out, static_cast<uint64_t>(status));
    out.append(" ").append(phrase).append("\r\n");
}

}  // namespace

void write_request_head(std::string& out, const RequestHead& head, std::string_view host,
                        std::string_view request_id, std::optional<uint64_t> content_length,
                        std::span<const OwnField> extra) {
    out.append(head.method).append(" ").append(head.target).append(" HTTP/1.1\r\n");
    append_field(out, "Host", host);
    append_forwarded(out, head.fields);
    append_field(out, "X-Request-Id", request_id);
    append_own(out, extra);
    if (content_length) append_length(out, *content_length);
    out.append("\r\n");
}

void write_response_head(std::string& out, const ResponseHead& head, std::span<const OwnField> extra,
                         bool chunked, bool close) {
    append_status_line(out, head.status, head.phrase);
    append_forwarded(out, head.fields);
    if (chunked) append_field(out, "Transfer-Encoding", "chunked");
    append_own(out, extra);
    if (close) append_field(out, "Connection", "close");
    out.append("\r\n");
}

void write_own_answer(std::string& out, const OwnAnswer& answer) {
    append_status_line(out, answer.status, phrase_of(answer.status));
    append_field(out, "Content-Type", answer.content_type);
    append_length(out, answer.body.size());
    append_own(out, answer.extra);
    if (!answer.request_id.empty()) append_field(out, "X-Request-Id", answer.request_id);
    if (answer.close) append_field(out, "Connection", "close");
    out.append("\r\n");
    if (!answer.head_only) out.append(answer.body);
}

std::string error_body(int status, std::string_view reason, std::string_view sentence) {
    std::string out = "{\"error\":{\"message\":";
    json::append_string(out, sentence);
    out.append(status < 500 ? ",\"type\":\"invalid_request_error\"" : ",\"type\":\"server_error\"");
    out.append(",\"param\":null,\"code\":");
    json::append_string(out, reason);
    return out.append("}}");
}

std::string error_event(std::string_view reason, std::string_view sentence, bool chunked) {
    std::string event = "data: " + error_body(502, reason, sentence) + "\n\n";
    if (!chunked) return event;
    std::string out;
    append_number(out, event.size(), 16);
    return out.append("\r\n").append(event).append("\r\n0\r\n\r\n");
}

std::string_view phrase_of(int status) {
    for (const Phrase& phrase : kPhrases) {
        if (phrase.status == status) return phrase.text;
    }
    return "";
}

}  // namespace moonpool::http
