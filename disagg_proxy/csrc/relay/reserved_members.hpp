// What the proxy alone says to an engine, and no client: where an engine connects to, which rank computes, by
// which name a request is known inside of the engine, and the engine's credential. A client that could say it
// would have engines call any address, read what others left in a cache, or end other clients' requests.
//
// Members of a body and fields of a head are listed here, in one place, for all engines and all paths: an
// engine ignores those of another kind. Clients' ones are dropped and counted, not refused: libraries send
// some of them with harmless values.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "http/fields.hpp"
#include "json/scanner.hpp"

namespace moonpool::relay {

// The body without reserved members: neither its own, nor those of the members in which engines look for
// further arguments. nullopt: it has none. body: of a request, scanned. members_max: of each member that is
// looked into; one that has more is dropped whole.
std::optional<std::string> without_reserved(const json::Object& body, size_t members_max);

// Clears `forward` of each reserved field; returns how many that were. A credential does not count: each
// client with an API key sends one.
size_t hold_back_reserved(http::Fields& fields);

// Whether an engine would read addresses out of this X-Request-Id.
bool is_reserved_id(std::string_view request_id);

}  // namespace moonpool::relay
