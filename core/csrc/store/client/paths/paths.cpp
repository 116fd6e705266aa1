// The table of paths: which one an address leads to.
#include "store/client/paths/arena_path.hpp"
#include "store/client/paths/tcp_path.hpp"

namespace moonpool {

namespace {

struct PathKind {
    std::string_view scheme;  // of its routes
    void (*set_address)(ClientOptions& options, std::string_view address);
    bool (*leads)(const ClientOptions& options);  // whether the options name an address of this kind
    Result<std::unique_ptr<BlockPath>> (*open)(Session& session, const ClientOptions& options);
};

constexpr PathKind kPaths[] = {
    {"tcp:", [](ClientOptions& options, std::string_view address) { options.address = address; },
     [](const ClientOptions& options) { return !options.address.empty(); }, TcpPath::open},
    {"unix:", [](ClientOptions& options, std::string_view address) { options.socket_path = address; },
     [](const ClientOptions&) { return true; }, ArenaPath::open},
};

}  // namespace

Result<std::unique_ptr<BlockPath>> open_path(Session& session, const ClientOptions& options) {
    for (const PathKind& kind : kPaths) {
        if (kind.leads(options)) return kind.open(session, options);
    }
    return Error{Code::kInvalidArgument, "the options name no address of a node"};
}

bool set_route(ClientOptions& options, std::string_view route) {
    for (const PathKind& kind : kPaths) {
        if (!route.starts_with(kind.scheme)) continue;
        kind.set_address(options, route.substr(kind.scheme.size()));
        return true;
    }
    return false;
}

std::vector<std::string_view> path_schemes() {
    std::vector<std::string_view> schemes;
    for (const PathKind& kind : kPaths) schemes.push_back(kind.scheme);
    return schemes;
}

}  // namespace moonpool
