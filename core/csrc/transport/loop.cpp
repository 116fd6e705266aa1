#include "transport/loop.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <chrono>
#include <system_error>

#include "transport/transport.hpp"

namespace moonpool::transport {

namespace {

constexpr uint64_t kTickMs = 50;

// The loop keeps polling this long after the last event before it sleeps: waking a sleeping thread on another
// core costs 20-50 us in a virtual machine, more than a small transfer. An idle engine costs nothing.
constexpr uint64_t kSpinNs = 50000;

// Whether what came last was sent from this very core: then polling keeps the peer from it, and the kernel
// switches to whom it wakes for less. (Over a real network: whether this core took the interrupt.)
bool from_this_core(int fd) {
    int cpu = -1;
    socklen_t size = sizeof(cpu);
    return ::getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &size) == 0 && cpu == ::sched_getcpu();
}

}  // namespace

uint64_t now_ns() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

Result<std::unique_ptr<Loop>> Loop::start(const char* name) {
    std::unique_ptr<Loop> loop(new Loop());
    loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    loop->wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!loop->epoll_.valid() || !loop->wake_.valid()) return os_error("epoll");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = loop->wake_.get();
    ::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event);
    try {
        loop->thread_ = std::thread([raw = loop.get()] { raw->run(); });
    } catch (const std::system_error& error) {
        return os_error("cannot start a thread", error.code().value());
    }
    ::pthread_setname_np(loop->thread_.native_handle(), name);
    return loop;
}

Loop::~Loop() { stop(); }

bool Loop::post(std::function<void()> function) {
    bool first;
    {
        std::lock_guard lock(mutex_);
        if (stopped_) return false;
        first = posted_.empty();
        posted_.push_back(std::move(function));
    }
    uint64_t one = 1;
    if (first) (void)!::write(wake_.get(), &one, sizeof(one));
    return true;
}

void Loop::stop() {
    if (!thread_.joinable()) return;
    if (fork_.in_child()) {
        (void)new std::thread(std::move(thread_));  // the parent's: there is nobody to join
        // Its handlers stay as they are: their sockets were closed by the fork, their memory is the parent's.
        (void)new std::unordered_map<int, std::shared_ptr<Handler>>(std::move(handlers_));
        return;
    }
    {
        std::lock_guard lock(mutex_);
        stopped_ = true;
    }
    stopping_ = true;
    uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
    thread_.join();
}

bool Loop::add(int fd, uint32_t events, std::shared_ptr<Handler> handler) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
    handlers_[fd] = std::move(handler);
    return true;
}

void Loop::watch(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

std::shared_ptr<Handler> Loop::remove(int fd) {
    auto it = handlers_.find(fd);
    if (it == handlers_.end()) return nullptr;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    std::shared_ptr<Handler> handler = std::move(it->second);
    handlers_.erase(it);
    return handler;
}

void Loop::run() {
    std::vector<epoll_event> events(256);
    uint64_t last_tick_ms = now_ms();
    uint64_t spin_until_ns = 0;
    const bool alone = std::thread::hardware_concurrency() < 2;
    while (!stopping_) {
        bool spin = !alone && now_ns() < spin_until_ns;
        int timeout = spin ? 0 : handlers_.empty() ? -1 : static_cast<int>(kTickMs);
        int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
        if (n == 0 && spin) ::sched_yield();  // the peer may wait for this very core
        bool near = n > 0 && from_this_core(events[0].data.fd);
        for (int i = 0; i < n; ++i) {
            int fd = events[static_cast<size_t>(i)].data.fd;
            if (fd == wake_.get()) {
                uint64_t value;
                (void)!::read(wake_.get(), &value, sizeof(value));
                run_posted();
                continue;
            }
            auto it = handlers_.find(fd);
            if (it == handlers_.end()) continue;
            std::shared_ptr<Handler> handler = it->second;  // it may take itself out meanwhile
            if (!handler->on_events(events[static_cast<size_t>(i)].events)) drop(fd, handler);
        }
        uint64_t now = now_ns();
        if (n > 0) spin_until_ns = near ? 0 : now + kSpinNs;
        if (now / 1000000 - last_tick_ms >= kTickMs) {
            last_tick_ms = now / 1000000;
            tick();
        }
    }
    run_posted();
    handlers_.clear();
}

void Loop::tick() {
    std::vector<std::pair<int, std::shared_ptr<Handler>>> all(handlers_.begin(), handlers_.end());
    for (auto& [fd, handler] : all) {
        if (!handler->on_tick(now_ms())) drop(fd, handler);
    }
}

// It may have taken itself out already, and its number may be another's by now.
void Loop::drop(int fd, const std::shared_ptr<Handler>& handler) {
    auto it = handlers_.find(fd);
    if (it != handlers_.end() && it->second == handler) remove(fd);
}

void Loop::run_posted() {
    std::vector<std::function<void()>> posted;
    {
        std::lock_guard lock(mutex_);
        posted.swap(posted_);
    }
    for (auto& function : posted) function();
}

}  // namespace moonpool::transport
