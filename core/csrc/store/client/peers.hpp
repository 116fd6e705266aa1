// Peers: a client's ways to the other nodes of the pool, opened when first needed and kept. A node of this
// host is reached by its Unix socket, so that its memory is mapped; any other over TCP. A node that was
// restarted is another one: a client that still goes by what the former one held gets no answer from it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "directory/types.hpp"
#include "store/client/node_client.hpp"

namespace moonpool {

class Peers {
   public:
    // own: how the client reaches its own node; token, space and deadlines are the same everywhere.
    explicit Peers(ClientOptions own) : own_(std::move(own)) {}

    std::shared_ptr<NodeClient> node(const Member& member, const std::string& own_host_id);
    // By what route() gave to another process.
    std::shared_ptr<NodeClient> node(const std::string& route, const Incarnation& incarnation);
    void close();

    // How a process of `own_host_id` reaches a member: "unix:PATH" or "tcp:HOST:PORT".
    static std::string route(const Member& member, const std::string& own_host_id);

   private:
    static constexpr size_t kNodesMax = 1024;  // beyond it the ways to all are closed and found anew

    ClientOptions own_;
    Mutex mutex_;
    bool closed_ GUARDED_BY(mutex_) = false;
    // By route and life.
    std::map<std::pair<std::string, Incarnation>, std::shared_ptr<NodeClient>> nodes_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
