#include "relay/usage.hpp"

#include <algorithm>

namespace moonpool::relay {

namespace {

constexpr size_t kLookedAtBytes = 2048;
constexpr std::string_view kUsage = "\"usage\"";

std::string_view tail_of(std::string_view body) {
    return body.size() > kLookedAtBytes ? body.substr(body.size() - kLookedAtBytes) : body;
}

int32_t number_of(std::string_view object, std::string_view quoted_key) {
    size_t at = object.find(quoted_key);
    if (at == std::string_view::npos) return -1;
    at += quoted_key.size();
    while (at < object.size() && (object[at] == ' ' || object[at] == ':')) ++at;
    int64_t value = -1;
    for (; at < object.size() && object[at] >= '0' && object[at] <= '9'; ++at) {
        value = std::max<int64_t>(value, 0) * 10 + (object[at] - '0');
        if (value > INT32_MAX) return -1;
    }
    return static_cast<int32_t>(value);
}

}  // namespace

Usage usage_of(std::string_view object) {
    return {number_of(object, "\"prompt_tokens\""), number_of(object, "\"cached_tokens\""),
            number_of(object, "\"completion_tokens\"")};
}

bool find_native_usage(std::string_view body, Usage& usage) {
    usage = usage_of(tail_of(body));
    return usage.prompt >= 0;
}

bool find_usage(std::string_view body, Usage& usage) {
    body = tail_of(body);
    size_t at = body.rfind(kUsage);
    if (at == std::string_view::npos) return false;
    std::string_view object = body.substr(at + kUsage.size());
    // Up to the brace that closes it; there are no strings in a usage object.
    int depth = 0;
    size_t end = 0;
    for (; end < object.size(); ++end) {
        if (object[end] == '{') ++depth;
        if (object[end] == '}' && --depth <= 0) break;
        if (depth == 0 && object[end] != ' ' && object[end] != ':') return false;  // null
    }
    if (end == object.size()) return false;
    usage = usage_of(object.substr(0, end));
    return true;
}

}  // namespace moonpool::relay
