#include "relay/logprob_merge.hpp"

#include <cstdio>
#include <utility>

namespace moonpool::relay {

namespace {

constexpr size_t kBufferBytesKept = 16 << 10;  // of a buffer, for the next answer

bool is_event_stream(const http::ResponseHead& head) {
    const http::Field* type = http::find_field(head.fields, "content-type");
    return type != nullptr && type->value.starts_with("text/event-stream");
}

void put(std::string& out, std::string_view text, bool chunked, uint64_t& body_bytes) {
    char size[24];
    std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
    if (chunked) out += size;
    out += text;
    if (chunked) out += "\r\n";
    body_bytes += text.size();
}

}  // namespace

bool LogprobMerge::can_take(const http::ResponseHead& head) {
    return head.framing != http::Framing::kLength || !is_event_stream(head);
}

void LogprobMerge::clear() {
    active_ = stream_ = complete_ = false;
    logprobs_.reset();
    for (std::string* text : {&held_, &prefill_}) {
        text->capacity() > kBufferBytesKept ? void(*text = std::string()) : text->clear();
    }
}

void LogprobMerge::begin(const http::ResponseHead& head) {
    active_ = true;
    stream_ = is_event_stream(head);
    reader_ = http::BodyReader(head.framing, head.content_length);
}

void LogprobMerge::take(std::string_view body, bool complete) {
    reader_.take_all(body, held_);
    complete_ = complete;
}

void LogprobMerge::take_prompt(std::string prefill) {
    prefill_ = std::move(prefill);
    logprobs_.emplace(prefill_);
}

bool LogprobMerge::put_events(std::string& out, size_t most, bool chunked, uint64_t& body_bytes) {
    std::string_view left = held_;
    bool more = true;
    while (more && out.size() < most) {
        std::string_view event = next_event(left);
        more = !event.empty();
        if (more) put(out, "data: " + logprobs_->put_into(event) + "\n\n", chunked, body_bytes);
    }
    held_.erase(0, held_.size() - left.size());
    return more;
}

void LogprobMerge::put_rest(std::string& out, bool chunked, uint64_t& body_bytes) {
    if (!held_.empty()) put(out, held_, chunked, body_bytes);
    held_.clear();
    if (chunked) out += "0\r\n\r\n";
}

}  // namespace moonpool::relay
