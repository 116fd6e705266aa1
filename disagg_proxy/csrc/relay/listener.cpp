#include "relay/listener.hpp"

#include <sys/socket.h>

#include <cerrno>

#include "relay/client_table.hpp"
#include "relay/context.hpp"
#include "relay/tcp.hpp"

namespace moonpool::relay {

Listener::Listener(RelayContext& context, ClientTable& clients, int listening)
    : context_(context), clients_(clients) {
    fd.reset(listening);
    // What is accepted inherits it: six system calls less for each client.
    tune(listening, context.settings.deadlines.tcp_dead_peer_s);
}

void Listener::on_events(uint32_t) {
    // Not without end: those that are connected come first.
    for (int i = 0; i < 64 && take_one(); ++i) {
    }
}

void Listener::take_all() {
    while (take_one()) {
    }
}

bool Listener::take_one() {
    for (;;) {
        sockaddr_storage peer{};
        socklen_t size = sizeof(peer);
        int accepted =
            ::accept4(fd.get(), reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (accepted >= 0) {
            clients_.accept(accepted, peer);
            return true;
        }
        if (errno == EINTR || errno == ECONNABORTED) continue;  // that one has left; the next may be there
        // No descriptor or memory left: they wait in the kernel's queue. Watched on, the socket would be
        // reported again and again meanwhile.
        if (errno != EAGAIN) context_.poller.watch(*this, 0);
        return false;
    }
}

void Listener::sweep() { context_.poller.watch(*this, EPOLLIN); }

}  // namespace moonpool::relay
