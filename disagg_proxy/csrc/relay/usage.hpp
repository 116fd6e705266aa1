// What an engine's answer says of its tokens.
#pragma once

#include <cstdint>
#include <string_view>

namespace moonpool::relay {

struct Usage {
    int32_t prompt = -1, cached = -1, completion = -1;  // -1: not told
};

// Of the text of a usage object.
Usage usage_of(std::string_view object);

// Looks for a last "usage": {...} in the end of a body (one answer, or events of a stream). It does not parse
// what stands before: the figures are hints for a policy, and a text that imitates them misleads only it.
bool find_usage(std::string_view body, Usage& usage);

// The same in what SGLang's /generate answers, where the figures stand in "meta_info".
bool find_native_usage(std::string_view body, Usage& usage);

}  // namespace moonpool::relay
