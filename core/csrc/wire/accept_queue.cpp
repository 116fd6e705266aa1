#include "wire/accept_queue.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "wire/address.hpp"

namespace moonpool {

Result<std::unique_ptr<AcceptQueue>> AcceptQueue::create(Fd listening, size_t places) {
    if (places == 0) return Error{Code::kInvalidArgument, "a queue of connections needs a place"};
    int flags = ::fcntl(listening.get(), F_GETFL);
    if (flags < 0 || ::fcntl(listening.get(), F_SETFL, flags | O_NONBLOCK) < 0) return os_error("fcntl");
    std::unique_ptr<AcceptQueue> queue(new AcceptQueue(places));
    EventLoopOptions options;
    options.name = "mp-accept";
    options.tick_ms = 1000;
    options.idle = [] { return true; };
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(options));
    if (!loop) return loop.error();
    queue->loop_ = std::move(*loop);
    queue->wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    queue->spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!queue->wake_.valid()) return os_error("eventfd");
    queue->listening_ = std::make_shared<Listening>(*queue, std::move(listening));
    return queue;
}

AcceptQueue::~AcceptQueue() { stop(); }

Status AcceptQueue::start() {
    if (listening_ == nullptr) return success();
    const int fd = listening_->fd.get();
    if (!loop_->add(fd, EPOLLIN, std::exchange(listening_, nullptr))) return os_error("epoll");
    return loop_->start();
}

void AcceptQueue::stop() {
    if (!loop_->stop()) return;  // a child of fork(): all of it is the parent's
    listening_.reset();
    MutexLock lock(mutex_);
    by_network_.clear();
    waiting_ = 0;
}

void AcceptQueue::accept_all(int listening) {
    for (int round = 0; round < 256; ++round) {  // then the loop looks whether it is to end
        SocketAddress peer;
        peer.size = sizeof(peer.storage);
        Fd fd(::accept4(listening, peer.get(), &peer.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd.valid()) {
            enqueue(std::move(fd), network_of(peer));
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EMFILE || errno == ENFILE) {  // ended by the spare one, rather than asked for for ever
            spare_.reset();
            Fd refused(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
            ++dropped_total_;
            refused.reset();
            spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        }
        return;
    }
}

void AcceptQueue::enqueue(Fd fd, std::string network) {
    Fd crowded_out;  // closed without the lock
    bool first = false;
    {
        MutexLock lock(mutex_);
        by_network_[std::move(network)].push_back(std::move(fd));
        first = waiting_++ == 0;
        if (waiting_ > places_) {
            auto crowd = std::ranges::max_element(by_network_, {},
                                                  [](const auto& entry) { return entry.second.size(); });
            crowded_out = std::move(crowd->second.front());
            crowd->second.pop_front();
            if (crowd->second.empty()) by_network_.erase(crowd);
            --waiting_;
            ++dropped_total_;
        }
    }
    uint64_t one = 1;
    if (first) (void)!::write(wake_.get(), &one, sizeof(one));
}

std::vector<Fd> AcceptQueue::take(size_t most) {
    std::vector<Fd> taken;
    MutexLock lock(mutex_);
    while (taken.size() < most && !by_network_.empty()) {
        auto next = by_network_.upper_bound(last_);
        if (next == by_network_.end()) next = by_network_.begin();
        last_ = next->first;
        taken.push_back(std::move(next->second.front()));
        next->second.pop_front();
        if (next->second.empty()) by_network_.erase(next);
        --waiting_;
    }
    uint64_t count;
    if (waiting_ == 0) (void)!::read(wake_.get(), &count, sizeof(count));
    return taken;
}

}  // namespace moonpool
