// Which paths exist: relayed to an engine, answered by the proxy itself, or neither. Paths of an engine
// outside of these (vLLM's /sleep, /collective_rpc, ...) are for its operator, not for clients.
#pragma once

#include <string_view>

#include "http/refusal.hpp"

namespace moonpool::relay {

enum class Route { kRelay, kPage, kModels, kRefused };

// kModels: GET /v1/models, which the proxy answers once it knows its engines' models. kRefused: `refusal`
// says why (404, 405). registry: the paths under which engines register exist, too; they look at keys
// themselves.
Route route(std::string_view method, std::string_view path, http::Refusal& refusal, bool registry = false);

}  // namespace moonpool::relay
