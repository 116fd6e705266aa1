#include "base/event_loop.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

namespace moonpool {

namespace {

bool from_this_core(int fd) {
    int cpu = -1;
    socklen_t size = sizeof(cpu);
    return ::getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &size) == 0 && cpu == ::sched_getcpu();
}

void add_one(const Fd& counter) {
    uint64_t one = 1;
    (void)!::write(counter.get(), &one, sizeof(one));
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::create(EventLoopOptions options) {
    std::unique_ptr<EventLoop> loop(new EventLoop(std::move(options)));
    loop->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    loop->wake_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!loop->epoll_.valid() || !loop->wake_.valid()) return os_error("epoll");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = loop->wake_.get();
    if (::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event) != 0)
        return os_error("epoll");
    return loop;
}

EventLoop::~EventLoop() { stop(); }

Status EventLoop::start() {
    if (fork_.in_child()) {
        return Error{Code::kClosed, "it was made before a fork; make it in the process that uses it"};
    }
    if (thread_.started()) return success();
    {
        MutexLock lock(mutex_);
        stopped_ = false;
    }
    stopping_ = false;
    return thread_.start(options_.name, [this] { run(); });
}

bool EventLoop::post(std::function<void()> function) {
    if (fork_.in_child()) return false;
    bool first;
    {
        MutexLock lock(mutex_);
        if (stopped_) return false;
        first = posted_.empty();
        posted_.push_back(std::move(function));
    }
    if (first) add_one(wake_);
    return true;
}

bool EventLoop::call(std::function<void()> function, uint32_t timeout_ms) {
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> finished = done->get_future();
    bool posted = post([function = std::move(function), done] {
        function();
        done->set_value();
    });
    return posted && finished.wait_for(std::chrono::milliseconds(timeout_ms)) == std::future_status::ready;
}

bool EventLoop::is_alive(LivenessProbe::Clock::time_point deadline) {
    if (fork_.in_child() || stopping_) return false;
    auto ask = [this] {
        if (!post([this] { probe_.answer(); })) probe_.answer();  // it stops: no caller waits for it
    };
    return probe_.ask(ask, deadline) && !stopping_;
}

bool EventLoop::stop() {
    if (fork_.in_child()) {
        (void)thread_.join();
        // The handlers stay as they are: their sockets were closed by the fork, their memory is the parent's.
        (void)new std::unordered_map<int, std::shared_ptr<EventHandler>>(std::move(handlers_));
        return false;
    }
    {
        MutexLock lock(mutex_);
        stopped_ = true;
    }
    stopping_ = true;
    add_one(wake_);
    (void)thread_.join();
    return true;
}

bool EventLoop::add(int fd, uint32_t events, std::shared_ptr<EventHandler> handler) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
    handlers_[fd] = std::move(handler);
    return true;
}

void EventLoop::watch(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

std::shared_ptr<EventHandler> EventLoop::remove(int fd) {
    auto it = handlers_.find(fd);
    if (it == handlers_.end()) return nullptr;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    std::shared_ptr<EventHandler> handler = std::move(it->second);
    handlers_.erase(it);
    return handler;
}

void EventLoop::run() {
    std::vector<epoll_event> events(256);
    uint64_t last_tick_ms = now_ms(), spin_until_ns = 0;
    const uint64_t spin_ns = std::thread::hardware_concurrency() < 2 ? 0 : uint64_t{options_.spin_us} * 1000;
    while (!stopping_) {
        bool spin = spin_until_ns != 0 && now_ns() < spin_until_ns;
        bool idle = options_.idle != nullptr ? options_.idle() : handlers_.empty();
        int timeout = spin ? 0 : idle ? -1 : static_cast<int>(options_.tick_ms);
        int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
        if (n == 0 && spin) ::sched_yield();  // the peer may wait for this very core
        bool near =
            spin_ns != 0 && !options_.spins_beside_sender && n > 0 && from_this_core(events[0].data.fd);
        bool expects_more = false;
        for (int i = 0; i < n; ++i) {
            int fd = events[static_cast<size_t>(i)].data.fd;
            if (fd == wake_.get()) {
                uint64_t value;
                (void)!::read(wake_.get(), &value, sizeof(value));
                run_posted();
                expects_more = true;
                continue;
            }
            auto it = handlers_.find(fd);
            if (it == handlers_.end()) continue;
            std::shared_ptr<EventHandler> handler = it->second;  // it may take itself out meanwhile
            if (!handler->on_events(events[static_cast<size_t>(i)].events)) {
                drop(fd, handler);
            } else {
                expects_more |= handler->expects_more();
            }
        }
        uint64_t now = now_ns();
        if (expects_more) spin_until_ns = near || spin_ns == 0 ? 0 : now + spin_ns;
        // After all events: a peer whose bytes wait to be read is not silent.
        if (now / 1000000 - last_tick_ms >= options_.tick_ms) {
            last_tick_ms = now / 1000000;
            tick();
        }
    }
    run_posted();
    while (!handlers_.empty()) remove(handlers_.begin()->first);
}

void EventLoop::tick() {
    if (options_.on_tick != nullptr) options_.on_tick(now_ms());
    // Copied, since handlers may go meanwhile.
    const uint32_t every = std::max(options_.ticks_per_handler, 1u), turn = ticks_++ % every;
    std::vector<std::pair<int, std::shared_ptr<EventHandler>>> due;
    for (auto& [fd, handler] : handlers_) {
        if (static_cast<uint32_t>(fd) % every == turn) due.emplace_back(fd, handler);
    }
    for (auto& [fd, handler] : due) {
        if (!handler->on_tick(now_ms())) drop(fd, handler);
    }
}

// It may have taken itself out already, and its number may be another's by now.
void EventLoop::drop(int fd, const std::shared_ptr<EventHandler>& handler) {
    auto it = handlers_.find(fd);
    if (it != handlers_.end() && it->second == handler) remove(fd);
}

void EventLoop::run_posted() {
    std::vector<std::function<void()>> posted;
    {
        MutexLock lock(mutex_);
        posted.swap(posted_);
    }
    for (auto& function : posted) function();
}

}  // namespace moonpool
