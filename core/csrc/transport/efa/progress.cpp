#include "transport/efa/progress.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/clock.hpp"

namespace moonpool::transport::efa {

namespace {

constexpr int kRoundsMax = 16;
constexpr uint64_t kUnderWayNs = 100'000, kNapNs = 1'000'000, kTickNs = 100'000'000;
constexpr uint64_t kLookNs = 50'000;  // without sleeping, after the last time that a peer did something

}  // namespace

void Server::add(Endpoint* endpoint) {
    MutexLock lock(mutex_);
    endpoints_.push_back(endpoint);
}

void Server::remove(Endpoint* endpoint) {
    MutexLock lock(mutex_);
    std::erase(endpoints_, endpoint);
}

// What peers do completes nothing here; what fails of it they are told.
bool Server::poll(std::vector<pollfd>& fds) {
    MutexLock lock(mutex_);
    bool all_tell = true;
    for (Endpoint* endpoint : endpoints_) {
        int fd = -1;
        for (int round = 0; round < kRoundsMax && fd < 0; ++round) {
            std::array<fi::CqEntry, 16> entries;
            if (endpoint->take_completions(entries) == -fi::kErrorAvailable) (void)endpoint->error();
            if (!endpoint->tells()) break;
            fd = endpoint->wait_fd();
        }
        if (fd >= 0) fds.push_back({fd, POLLIN, 0});
        all_tell = all_tell && fd >= 0;
    }
    return all_tell;
}

Result<std::shared_ptr<Progress>> Progress::start(std::vector<std::shared_ptr<Server>> servers) {
    std::shared_ptr<Progress> made(new Progress(std::move(servers)));
    made->wake_ = Fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (made->wake_.get() < 0) return os_error("eventfd");
    // Its owner stops it before it goes.
    if (Status started = made->thread_.start("mp-fabric", [p = made.get()] { p->run(); }); !started) {
        return started.error();
    }
    return made;
}

void Progress::watch(std::shared_ptr<EventHandler> watcher) {
    MutexLock lock(mutex_);
    watchers_.push_back(std::move(watcher));
}

void Progress::wake() {
    // Its own thread looks before it sleeps.
    if (!under_way_.exchange(true) && !thread_.is_this()) wake_once();
}

void Progress::wake_once() {
    uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
}

void Progress::stop() {
    stopping_ = true;
    wake_once();
    (void)thread_.join();
}

void Progress::tell(bool events, bool tick) {
    std::list<std::shared_ptr<EventHandler>> watchers;
    {
        MutexLock lock(mutex_);
        watchers.swap(watchers_);
    }
    std::erase_if(watchers, [&](const auto& watcher) {
        return (events && !watcher->on_events(0)) || (tick && !watcher->on_tick(now_ns() / 1'000'000));
    });
    MutexLock lock(mutex_);
    watchers_.splice(watchers_.end(), watchers);
}

void Progress::run() {
    uint64_t next_tick = now_ns() + kTickNs, look_until = 0;
    std::vector<pollfd> fds;
    while (!stopping_) {
        fds.assign(1, {wake_.get(), POLLIN, 0});
        bool all_tell = true;
        for (const auto& server : servers_) all_tell = server->poll(fds) && all_tell;
        uint64_t now = now_ns();
        bool tick = now >= next_tick;
        if (tick) next_tick = now + kTickNs;
        bool events = under_way_.exchange(false);
        if (events || tick) tell(events, tick);
        uint64_t sleep_ns = next_tick - std::min(now, next_tick);
        if (!all_tell) sleep_ns = std::min(sleep_ns, kNapNs);
        if (under_way_.load()) sleep_ns = std::min(sleep_ns, kUnderWayNs);
        const bool looks = now < look_until;
        if (looks) sleep_ns = 0;
        timespec until{0, static_cast<long>(sleep_ns)};
        (void)::ppoll(fds.data(), fds.size(), &until, nullptr);
        if (std::any_of(fds.begin() + 1, fds.end(), [](const pollfd& fd) { return fd.revents != 0; })) {
            look_until = now_ns() + kLookNs;
        } else if (looks) {
            ::sched_yield();  // the peer may be on this core
        }
        uint64_t count = 0;
        if ((fds.front().revents & POLLIN) != 0) (void)!::read(wake_.get(), &count, sizeof(count));
    }
}

}  // namespace moonpool::transport::efa
