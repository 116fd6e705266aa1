#include "transport/tcp/target.hpp"

#include <sys/epoll.h>

#include "transport/tcp/connection.hpp"

namespace moonpool::transport::tcp {

void Target::adopt(AuthenticatedConnection caller) {
    if (context_.counters.connections.fetch_add(1) >= kConnectionsMax) {
        context_.counters.connections.fetch_sub(1);
        context_.counters.connections_refused_total.fetch_add(1);
        return;  // closes it
    }
    Status ready = caller.tls == nullptr ? success() : staging_->reserve();
    EventLoop& loop = *context_.loops[next_.fetch_add(1) % context_.loops.size()];
    auto connection = std::make_shared<Connection>(*this, loop, std::move(caller.fd), std::move(caller.tls),
                                                   std::move(caller.peer));
    loop.post([&loop, connection, ready = std::move(ready)] {
        if (loop.add(connection->fd(), EPOLLIN, connection)) connection->begin(ready);
    });
}

bool Target::enlist(const Name& name, const std::shared_ptr<Connection>& connection) {
    MutexLock lock(mutex_);
    // Under the mutex: shut_out() finds the connection, or this finds that it is shut out.
    if (context_.shut_out->has(name.segment)) return false;
    auto& place = named_[name];
    if (!place.expired()) return false;
    place = connection;
    return true;
}

void Target::strike_off(const Name& name, const Connection* connection) {
    MutexLock lock(mutex_);
    std::erase_if(ended_, [](const auto& over) { return over.second->load() == 0; });
    if (connection->copying()->load() != 0) ended_[name] = connection->copying();
    auto it = named_.find(name);
    if (it == named_.end()) return;
    std::shared_ptr<Connection> current = it->second.lock();
    if (current != nullptr && current.get() != connection) return;
    named_.erase(it);
    auto of_peer = named_.lower_bound({name.segment, 0});
    bool left = of_peer == named_.end() || of_peer->first.segment != name.segment;
    lock.unlock();
    if (left) context_.left(name.segment);
}

CopiesUnderWay Target::fence(const Name& name) {
    std::shared_ptr<Connection> connection;
    CopiesUnderWay copying;
    {
        MutexLock lock(mutex_);
        auto it = named_.find(name);
        if (it != named_.end()) connection = it->second.lock();
        if (auto over = ended_.find(name); over != ended_.end()) copying = over->second;
    }
    context_.counters.fenced_total.fetch_add(1);
    if (connection == nullptr) return copying;
    connection->fence();
    return connection->copying();
}

void Target::shut_out(const SegmentId& segment) {
    std::vector<std::shared_ptr<Connection>> open;
    {
        MutexLock lock(mutex_);
        for (auto it = named_.lower_bound({segment, 0}); it != named_.end(); ++it) {
            if (it->first.segment != segment) break;
            if (std::shared_ptr<Connection> connection = it->second.lock()) open.push_back(connection);
        }
    }
    // Outside of the lock: the last reference to a connection strikes it off.
    for (const auto& connection : open) connection->fence();
    context_.counters.fenced_total.fetch_add(open.size());
}

bool Target::is_out(const SegmentId& segment) {
    std::vector<std::shared_ptr<Connection>> open;
    MutexLock lock(mutex_);
    for (auto it = named_.lower_bound({segment, 0}); it != named_.end(); ++it) {
        if (it->first.segment != segment) break;
        open.push_back(it->second.lock());
        if (open.back() != nullptr && open.back()->copying()->load() != 0) break;
    }
    bool busy = !open.empty() && open.back() != nullptr && open.back()->copying()->load() != 0;
    for (auto it = ended_.lower_bound({segment, 0}); it != ended_.end() && !busy; ++it) {
        busy = it->first.segment == segment && it->second->load() != 0;
    }
    lock.unlock();  // the last reference to a connection strikes it off
    return !busy;
}

}  // namespace moonpool::transport::tcp
