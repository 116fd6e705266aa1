// Poller: one epoll and the sockets in it. Level-triggered; a socket changes what it waits for only under
// back-pressure, so the usual request costs no epoll_ctl.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <vector>

#include "base/fd.hpp"

namespace moonpool::relay {

// Something with a file descriptor. When it is closed its object must live on until the poller's turn is
// over: an event of it may have been fetched already (see RelayContext::defer_delete).
class Socket {
   public:
    virtual ~Socket() = default;
    Socket() = default;
    Socket(const Socket&) = delete;

    virtual void on_events(uint32_t events) = 0;
    bool open() const { return fd.valid(); }

    Fd fd;
    uint32_t watched = 0;  // as epoll has it
};

class Poller {
   public:
    bool start() {
        epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
        return epoll_.valid();
    }
    Fd& fd() { return epoll_; }

    bool add(Socket& socket, uint32_t events) {
        epoll_event event{};
        event.events = socket.watched = events;
        event.data.ptr = &socket;
        return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.fd.get(), &event) == 0;
    }
    void watch(Socket& socket, uint32_t events) {
        if (socket.watched == events || !socket.open()) return;
        epoll_event event{};
        event.events = socket.watched = events;
        event.data.ptr = &socket;
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket.fd.get(), &event);
    }
    // Closing alone would not do: a copy of the descriptor elsewhere (at a listening socket's maker, in a
    // child between fork and exec) would keep the events of an object that is gone coming.
    void close(Socket& socket) {
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.fd.get(), nullptr);
        socket.fd.reset();
    }
    // Wait for events; between this and hand_out the owner looks at its clock.
    void wait(int timeout_ms) {
        int n = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
        count_ = n < 0 ? 0 : static_cast<size_t>(n);
    }
    // Those of sockets that were closed meanwhile are dropped.
    void hand_out() {
        for (size_t i = 0; i < count_; ++i) {
            auto* socket = static_cast<Socket*>(events_[i].data.ptr);
            if (socket->open()) socket->on_events(events_[i].events);
        }
        count_ = 0;
    }

   private:
    Fd epoll_;
    size_t count_ = 0;
    std::vector<epoll_event> events_ = std::vector<epoll_event>(256);
};

}  // namespace moonpool::relay
