#include "store/client/peers.hpp"

#include <unistd.h>

namespace moonpool {

namespace {

constexpr std::string_view kUnix = "unix:", kTcp = "tcp:";

}  // namespace

std::string Peers::route(const Member& member, const std::string& own_host_id) {
    const NodeIdentity& node = member.identity;
    bool here = !own_host_id.empty() && node.host_id == own_host_id && !node.socket_path.empty() &&
                ::access(node.socket_path.c_str(), R_OK | W_OK) == 0;
    return here ? std::string(kUnix) + node.socket_path : std::string(kTcp) + node.address;
}

std::shared_ptr<NodeClient> Peers::node(const Member& member, const std::string& own_host_id) {
    return node(route(member, own_host_id));
}

std::shared_ptr<NodeClient> Peers::node(const std::string& route) {
    MutexLock lock(mutex_);
    if (auto it = nodes_.find(route); it != nodes_.end()) return it->second;
    ClientOptions options = own_;
    options.dial = nullptr;
    options.socket_path.clear();
    options.address.clear();
    (void)set_route(options, route);
    auto made = std::make_shared<NodeClient>(std::move(options));
    if (closed_) {
        made->close();
        return made;
    }
    if (nodes_.size() >= kNodesMax) nodes_.clear();
    nodes_.emplace(route, made);
    return made;
}

void Peers::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    for (auto& [route, node] : nodes_) node->close();
    nodes_.clear();
}

}  // namespace moonpool
