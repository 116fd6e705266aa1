// W3C Trace Context: the field traceparent, "00-<32 hex>-<16 hex>-<2 hex>".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "relay/request.hpp"

namespace moonpool::relay {

// The ids of a client's field; nullopt when it is none that may be passed on.
std::optional<Trace> parse_traceparent(std::string_view value);

// The field's value, behind what `out` has. A trace that begins here is sampled, as an engine that got none
// would decide by itself.
void write_traceparent(const Trace& trace, std::string& out);

}  // namespace moonpool::relay
