// Which paths exist: relayed to an engine, answered by the proxy itself, or neither. Relayed are the paths of
// inference listed here, and those that the operator adds; all else of an engine (/v1/load_lora_adapter,
// /sleep, /collective_rpc, ...) is for its operator, not for clients.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "http/refusal.hpp"

namespace moonpool::relay {

enum class Route { kRelay, kPage, kModels, kRefused };

class Routes {
   public:
    // registry: the paths under which engines register exist, too; they look at keys themselves. added: paths
    // that are relayed, too; one that ends in "/*" stands for all below it.
    explicit Routes(bool registry = false, std::vector<std::string> added = {});

    // kModels: GET /v1/models, which the proxy answers once it knows its engines' models. kRefused: `refusal`
    // says why (400, 404, 405).
    Route find(std::string_view method, std::string_view path, http::Refusal& refusal) const;

    // Whether the path is one of those added. Only there may a body be a form.
    bool is_added(std::string_view path) const;

   private:
    bool registry_;
    std::vector<std::string> added_;
};

}  // namespace moonpool::relay
