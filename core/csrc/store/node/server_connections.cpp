// Server: connections that come and go.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/peer_process.hpp"
#include "memory/available.hpp"
#include "store/node/connection.hpp"
#include "store/node/server.hpp"
#include "wire/connection_places.hpp"

namespace moonpool {

// For a client in the same process (embedded node): a socket pair takes the place of the Unix socket. The
// client still does the whole handshake.
Result<Fd> Server::dial() {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return os_error("socketpair");
    Fd ours(pair[0]), theirs(pair[1]);
    int flags = ::fcntl(ours.get(), F_GETFL);
    ::fcntl(ours.get(), F_SETFL, flags | O_NONBLOCK);
    if (!running_) return Error{Code::kUnavailable, "the embedded node was stopped"};
    auto end = std::make_shared<Fd>(std::move(ours));
    if (!loop_->post([this, end] { adopt(std::move(*end)); })) {
        return Error{Code::kUnavailable, "the embedded node was stopped"};
    }
    return theirs;
}

void Server::accept_all(int listener) {
    for (;;) {
        Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) {
            // A peer that hung up while it waited in the queue says nothing about the next one.
            if (errno == EINTR || errno == ECONNABORTED) continue;
            if (errno == EMFILE || errno == ENFILE) {
                // Out of descriptors: give up the spare one to tell the peer, rather than spin on a readable
                // listener.
                spare_.reset();
                Fd refused(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
                if (refused.valid())
                    send_error(refused.get(), Code::kTooLarge, "the node is out of file descriptors");
                metrics_.connections_refused_total.fetch_add(1);
                refused.reset();
                spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
            }
            return;
        }
        if (!is_same_user(fd.get())) {
            metrics_.connections_refused_total.fetch_add(1);
            journal_->note(Level::kWarning, "auth_refused", "unix", "a process of another user was refused");
            send_error(fd.get(), Code::kAuth, "this node serves processes of its own user only");
            continue;
        }
        adopt(std::move(fd));
    }
}

void Server::adopt(Fd fd) {
    size_t unproved = 0;
    Connection* oldest = nullptr;
    int oldest_fd = -1;
    for (auto& [other, connection] : connections_) {
        if (connection->proved()) continue;
        ++unproved;
        if (oldest == nullptr || connection->since_ms() < oldest->since_ms()) {
            oldest = connection.get();
            oldest_fd = other;
        }
    }
    // An idle connection without proof makes room for the next one; proved clients keep theirs.
    if (unproved >= options_.limits.connections_unproved) drop(oldest_fd, true);
    if (!has_room(fd.get(), nullptr, false)) return;
    int key = fd.get();
    auto connection = std::make_shared<Connection>(*this, std::move(fd), now_ms());
    if (!loop_->add(key, Connection::kFirstEvents, connection))
        return count(metrics_.connections_closed_total);
    connections_.emplace(key, connection);
    // The challenge is sent by the node: the client proves the token before the node parses anything else
    // of it.
    if (!connection->greet()) drop(key);
}

// Each kind has its own places: however many other hosts call, the engines of this one get in. Their limit
// rises where it is too low.
bool Server::has_room(int fd, TlsStream* tls, bool remote) {
    size_t have = remote ? remote_connections_ : connections_.size() - remote_connections_;
    std::string limit;
    if (!remote) {
        // Each process that asks the master has one there as well, and each kind has so many places.
        if (relay_ != nullptr) have = std::max(have, relay_->connections());
        auto memory_bytes = [this] {
            std::optional<AvailableMemory> memory = available_memory(options_.memory_root);
            return memory ? memory->available_bytes : UINT64_MAX;
        };
        auto answer = connections_max_.admit(have, [&] {
            auto places = connection_places(have, remote_connections_max_ + kOtherFiles, memory_bytes);
            limit = places.because;
            return places.most;
        });
        if (answer != SoftLimit::Answer::kFull) limit.clear();
        if (answer == SoftLimit::Answer::kRaised) {
            journal_->note(Level::kWarning, "limit_raised", "",
                           "there are more connections of this host than node.connections_max = " +
                               std::to_string(connections_max_.set()) + "; the limit is " +
                               std::to_string(connections_max_.now()) + " now. Set it to what you expect");
        }
    } else if (have >= remote_connections_max_) {
        limit = remote_connections_max_ < options_.limits.remote_connections
                    ? "as many as the limit of open files allows"
                    : "the limit (node.remote_connections_max)";
    }
    if (!limit.empty()) {
        metrics_.connections_refused_total.fetch_add(1);
        journal_->note(Level::kWarning, "connections_full", "",
                       "a connection was refused: there are " + std::to_string(have) + ", " + limit);
        send_error(fd, Code::kTooLarge,
                   "the node already has " + std::to_string(have) + " connections of " +
                       (remote ? "other hosts, " : "its host, ") + limit,
                   tls);
        return false;
    }
    metrics_.connections_total.fetch_add(1);
    return true;
}

void Server::adopt_remote(AuthenticatedConnection caller) {
    if (described_) return;  // the other process knows nothing of it
    if (gives_) return waiting_.push_back(std::make_shared<AuthenticatedConnection>(std::move(caller)));
    auto it = pools_.find(caller.tenant);
    // The listener has checked token and tenant, and has sent the welcome; the tenants' rows may have been
    // replaced since. Returning closes the socket.
    if (it == pools_.end() || !options_.tenants->stands(caller.tenant, caller.access) ||
        !has_room(caller.fd.get(), caller.tls.get(), true))
        return;
    int key = caller.fd.get();
    // Of which no event will tell: what came along with the handshake, and what of it is still to go out.
    bool more = caller.tls != nullptr && caller.tls->pending();
    bool unsent = caller.tls != nullptr && caller.tls->unsent();
    auto connection = std::make_shared<Connection>(*this, std::move(caller.fd), std::move(caller.tls),
                                                   now_ms(), *it->second, caller.access);
    if (!loop_->add(key, Connection::kFirstEvents, connection))
        return count(metrics_.connections_closed_total);
    connections_.emplace(key, connection);
    ++remote_connections_;
    if (more || unsent) connection->on_events((more ? EPOLLIN : 0u) | (unsent ? EPOLLOUT : 0u));
}

// The connection that waited goes on; it may end with that.
void Server::resume(Connection& connection, uint64_t now) {
    int fd = connection.fd();
    if (!connection.resume(now)) drop(fd);
}

// Off the loop, so that the descriptor can belong to another one.
std::optional<RelayCaller> Server::take_relayed(Connections::iterator it) {
    std::shared_ptr<Connection> connection = it->second;
    if (!connection->is_relayed()) return std::nullopt;
    loop_->remove(it->first);
    connections_.erase(it);
    return connection->take_relayed();
}

void Server::drop(int fd, bool cut_off) {
    auto it = connections_.find(fd);
    if (it == connections_.end()) return;
    if (std::optional<RelayCaller> caller = take_relayed(it)) return relay_->adopt(std::move(*caller));
    // Dropped: the node ended it. Closed: the client did. Its destructor gives back what it held.
    cut_off |= it->second->cut_off();
    count(cut_off ? metrics_.connections_dropped_total : metrics_.connections_closed_total);
    remote_connections_ -= it->second->remote() ? 1 : 0;
    loop_->remove(fd);
    connections_.erase(it);
}

// Connections whose tenant's key is no longer among the rows.
void Server::end_withdrawn() {
    const uint64_t version = options_.tenants->version();
    if (std::exchange(tenants_seen_, version) == version) return;
    std::vector<std::shared_ptr<Connection>> all;
    for (auto& [fd, connection] : connections_) all.push_back(connection);
    for (const std::shared_ptr<Connection>& connection : all) {
        if (!connection->check_key()) drop(connection->fd(), true);
    }
}

}  // namespace moonpool
