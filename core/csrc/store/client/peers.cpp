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
    return node(route(member, own_host_id), member.identity.incarnation);
}

std::shared_ptr<NodeClient> Peers::node(const std::string& route, const Incarnation& incarnation) {
    MutexLock lock(mutex_);
    auto key = std::make_pair(route, incarnation);
    if (auto it = nodes_.find(key); it != nodes_.end()) return it->second;
    ClientOptions options = own_;
    options.dial = nullptr;
    options.socket_path.clear();
    options.address.clear();
    options.incarnation = incarnation;
    (void)set_route(options, route);
    auto made = std::make_shared<NodeClient>(std::move(options));
    if (closed_) {
        made->close();
        return made;
    }
    if (nodes_.size() >= kNodesMax) nodes_.clear();
    nodes_.emplace(std::move(key), made);
    return made;
}

void Peers::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    for (auto& [key, node] : nodes_) node->close();
    nodes_.clear();
}

}  // namespace moonpool
