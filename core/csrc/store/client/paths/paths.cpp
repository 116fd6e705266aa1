// The table of paths: which one an address leads to.
#include "store/client/paths/arena_path.hpp"
#include "store/client/paths/tcp_path.hpp"

namespace moonpool {

namespace {

// In the order in which they are asked: an address of another host goes before the socket of this one.
constexpr PathFactory kPaths[] = {
    {"tcp", [](ClientOptions& options, std::string_view address) { options.address = address; },
     [](const ClientOptions& options) -> std::string {
         return options.address.empty() ? "the options name no TCP port of a node" : "";
     },
     TcpPath::open},
    {"unix", [](ClientOptions& options, std::string_view address) { options.socket_path = address; },
     [](const ClientOptions&) { return std::string(); }, ArenaPath::open},
};

}  // namespace

std::span<const PathFactory> path_registry() { return kPaths; }

Result<std::unique_ptr<BlockPath>> open_path(Session& session, const ClientOptions& options) {
    for (const PathFactory& row : kPaths) {
        if (row.viable(options).empty()) return row.make(session, options);
    }
    return Error{Code::kInvalidArgument, "the options name no address of a node"};
}

bool set_route(ClientOptions& options, std::string_view route) {
    size_t colon = route.find(':');
    for (const PathFactory& row : kPaths) {
        if (route.substr(0, colon) != row.name || colon == std::string_view::npos) continue;
        row.set_address(options, route.substr(colon + 1));
        return true;
    }
    return false;
}

}  // namespace moonpool
