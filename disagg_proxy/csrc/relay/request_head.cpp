#include "relay/request_head.hpp"

#include <sys/random.h>

#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "http/head_writer.hpp"
#include "relay/reserved_members.hpp"
#include "relay/trace.hpp"

namespace moonpool::relay {

bool RequestIds::start() { return ::getrandom(random_.data(), sizeof(random_), 0) >= 0; }

uint64_t RequestIds::random() {  // xorshift128+
    uint64_t a = random_[0], b = random_[1];
    random_[0] = b;
    a ^= a << 23;
    random_[1] = a ^ b ^ (a >> 17) ^ (b >> 26);
    return random_[1] + b;
}

void RequestIds::give(Request& request, RelayContext& context) {
    if (request.id != 0) return;
    request.id = next_id_++;
    request.arrived_at = context.now;
    request.kind = kind_of_path(request.head.path);
    request.request_id = request.head.request_id;
    context.reserved[1] += hold_back_reserved(request.head.fields);
    if (is_reserved_id(request.request_id)) {
        request.request_id.clear();
        ++context.reserved[2];
    }
    if (request.request_id.empty()) {
        char digits[16];
        char* end = std::to_chars(digits, digits + sizeof(digits), request.id, 16).ptr;
        request.request_id.append(context.settings.instance).append("-").append(digits, end);
    }
    bool named = false;  // by the client
    for (http::Field& field : request.head.fields) {
        if (field.kind != http::FieldKind::kOther) continue;
        if (http::same_name(field.name, "x-moonpool-decision")) field.forward = false;
        if (!http::same_name(field.name, "traceparent")) continue;
        auto trace = parse_traceparent(field.value);
        field.forward = trace && !named && !context.settings.spans;
        if (!trace || named) continue;
        request.trace = *trace;
        named = true;
    }
    if (named && !context.settings.spans) return;
    for (size_t i = named ? 2 : 0; i < 3; ++i) {
        uint64_t word = random() | 1;  // never all zero
        std::memcpy(i < 2 ? request.trace.trace_id + 8 * i : request.trace.span_id, &word, 8);
    }
    write_traceparent(request.trace, request.traceparent);
}

void write_request_head(std::string& out, Request& request, const Engine& engine, size_t body_bytes,
                        const Plan* prefill) {
    http::RequestHead& head = request.head;
    std::optional<uint64_t> length;
    if (body_bytes > 0 || head.content_length >= 0 || head.framing == http::Framing::kChunked) {
        length = body_bytes;
    }
    std::array<http::OwnField, 6> own;
    size_t count = 0;
    if (!request.traceparent.empty()) own[count++] = {"traceparent", request.traceparent};
    if (!engine.settings.authorization.empty()) {
        own[count++] = {"Authorization", engine.settings.authorization};
    }
    std::vector<http::Field*> kept;  // fields of the client that the engine must not see
    if (prefill != nullptr) {
        for (const auto& [name, value] : prefill->prefill_headers) {
            if (count < own.size()) own[count++] = {name, value};
        }
        for (http::Field& field : head.fields) {
            // Its answer is read here, so it must not come compressed.
            bool keep = field.forward && http::same_name(field.name, "accept-encoding");
            for (const auto& [name, value] : prefill->prefill_headers) {
                keep = keep || (field.forward && http::same_name(field.name, name));
            }
            if (keep) kept.push_back(&field);
        }
    }
    for (http::Field* field : kept) field->forward = false;
    http::write_request_head(out, head, engine.settings.host, request.request_id, length,
                             std::span(own.data(), count));
    for (http::Field* field : kept) field->forward = true;
}

}  // namespace moonpool::relay
