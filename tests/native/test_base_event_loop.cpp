#include <doctest/doctest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "base/event_loop.hpp"

namespace moonpool {
namespace {

constexpr uint32_t kLongMs = 20000;  // for a machine that stands still; nothing here waits for its end

std::unique_ptr<EventLoop> made(EventLoopOptions options = {}) {
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(options));
    REQUIRE(loop);
    return std::move(*loop);
}

struct Pair {
    Pair() {
        int fds[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
        ours.reset(fds[0]);
        theirs.reset(fds[1]);
    }
    void speak() { REQUIRE(::write(theirs.get(), "x", 1) == 1); }
    Fd ours, theirs;
};

// Reads one byte at a time; ends when told.
struct Reader final : EventHandler {
    explicit Reader(int socket) : fd(socket) {}
    ~Reader() override { ended.set_value(); }
    bool on_events(uint32_t) override {
        char byte;
        if (::read(fd, &byte, 1) == 1) ++bytes;
        return !last;
    }
    bool on_tick(uint64_t) override {
        ++ticks;
        return ticks != ticks_max;
    }
    int fd;
    std::atomic<int> bytes{0}, ticks{0};
    int ticks_max = -1;
    bool last = false;
    std::promise<void> ended;
};

bool ready(std::future<void>& future) {
    return future.wait_for(std::chrono::milliseconds(kLongMs)) == std::future_status::ready;
}

TEST_CASE("event loop: what is posted before the start and before the stop is run, later posts are refused") {
    auto loop = made();
    std::atomic<int> ran{0};
    CHECK(loop->post([&] { ++ran; }));
    CHECK(ran == 0);
    REQUIRE(loop->start());
    CHECK(loop->call([&] { ++ran; }, kLongMs));
    CHECK(ran == 2);
    // The loop is held here, so that the last function is still queued when stop() is called.
    std::promise<void> held;
    loop->post([&] { held.get_future().wait(); });
    loop->post([&] { ++ran; });
    std::thread stopper([&] { CHECK(loop->stop()); });
    held.set_value();
    stopper.join();
    CHECK(ran == 3);
    CHECK_FALSE(loop->post([&] { ++ran; }));
    CHECK_FALSE(loop->call([&] { ++ran; }, kLongMs));
    CHECK(loop->stop());
    CHECK(ran == 3);
    REQUIRE(loop->start());
    CHECK(loop->call([&] { ++ran; }, kLongMs));
    CHECK(ran == 4);
}

TEST_CASE("event loop: a function that was refused is destroyed uncalled") {
    auto loop = made();
    REQUIRE(loop->start());
    loop->stop();
    auto held = std::make_shared<int>(1);
    std::weak_ptr<int> look = held;
    CHECK_FALSE(loop->post([held = std::move(held)] { FAIL("it was called"); }));
    CHECK(look.expired());
}

TEST_CASE("event loop: handlers hear of their own socket and end by their own word") {
    auto loop = made();
    Pair one, other;
    auto first = std::make_shared<Reader>(one.ours.get());
    auto second = std::make_shared<Reader>(other.ours.get());
    CHECK(loop->add(one.ours.get(), EPOLLIN, first));
    CHECK(loop->add(other.ours.get(), EPOLLIN, second));
    CHECK_FALSE(loop->add(one.ours.get(), EPOLLIN, first));  // it is in already
    REQUIRE(loop->start());
    one.speak();
    std::future<void> ended = first->ended.get_future();
    REQUIRE(loop->call(
        [&] {
            while (first->bytes == 0) first->on_events(0);
        },
        kLongMs));
    CHECK(second->bytes == 0);
    REQUIRE(loop->call([&] { first->last = true; }, kLongMs));
    first.reset();
    one.speak();
    CHECK(ready(ended));
    REQUIRE(loop->call([&] { CHECK(loop->remove(other.ours.get()) == second); }, kLongMs));
    REQUIRE(loop->call([&] { CHECK(loop->remove(other.ours.get()) == nullptr); }, kLongMs));
    loop->stop();
}

TEST_CASE("event loop: ticks come to the owner and to each handler, and end one that says so") {
    EventLoopOptions options;
    options.tick_ms = 1;
    std::promise<void> owner;
    bool told = false;
    options.on_tick = [&](uint64_t) {
        if (!std::exchange(told, true)) owner.set_value();
    };
    options.idle = [] { return false; };
    auto loop = made(std::move(options));
    Pair pair;
    auto reader = std::make_shared<Reader>(pair.ours.get());
    reader->ticks_max = 3;
    std::future<void> ended = reader->ended.get_future();
    std::future<void> ticked = owner.get_future();
    REQUIRE(loop->add(pair.ours.get(), EPOLLIN, std::move(reader)));
    REQUIRE(loop->start());
    CHECK(ready(ticked));
    CHECK(ready(ended));
    loop->stop();
}

TEST_CASE("event loop: a handler has one of as many ticks as its owner says") {
    EventLoopOptions options;
    options.tick_ms = 1;
    options.ticks_per_handler = 4;
    options.idle = [] { return false; };
    Pair pair;
    auto reader = std::make_shared<Reader>(pair.ours.get());
    std::atomic<bool> too_many{false};
    options.on_tick = [&, owner = 0](uint64_t) mutable {
        too_many = too_many || reader->ticks > ++owner / 4 + 1;
    };
    auto loop = made(std::move(options));
    REQUIRE(loop->add(pair.ours.get(), EPOLLIN, reader));
    REQUIRE(loop->start());
    while (reader->ticks < 3) std::this_thread::yield();
    CHECK_FALSE(too_many);
    loop->stop();
}

TEST_CASE("event loop: it starts again without its handlers, though their sockets stay open") {
    auto loop = made();
    Pair pair;
    auto first = std::make_shared<Reader>(pair.ours.get()),
         second = std::make_shared<Reader>(pair.ours.get());
    REQUIRE(loop->add(pair.ours.get(), EPOLLIN, first));
    REQUIRE(loop->start());
    CHECK(loop->stop());
    CHECK(first.use_count() == 1);
    pair.speak();
    REQUIRE(loop->start());
    std::atomic<bool> added{false};
    CHECK(loop->call([&] { added = loop->add(pair.ours.get(), EPOLLIN, second); }, kLongMs));
    CHECK(added);
    while (second->bytes == 0) std::this_thread::yield();
    CHECK(first->bytes == 0);
    loop->stop();  // before its sockets are closed
}

TEST_CASE("event loop: one that is held does not answer, and then does") {
    auto loop = made();
    REQUIRE(loop->start());
    auto soon = [](int ms) { return LivenessProbe::Clock::now() + std::chrono::milliseconds(ms); };
    CHECK(loop->is_alive(soon(kLongMs)));
    std::promise<void> held;
    loop->post([&] { held.get_future().wait(); });
    CHECK_FALSE(loop->is_alive(soon(10)));
    CHECK_FALSE(loop->call([] {}, 10));
    held.set_value();
    CHECK(loop->is_alive(soon(kLongMs)));
    loop->stop();
    CHECK_FALSE(loop->is_alive(soon(kLongMs)));
}

#if !defined(__SANITIZE_THREAD__)  // which knows no child of a process with threads
TEST_CASE("event loop: in a child of fork() it refuses, and its end waits for nothing") {
    auto loop = made();
    REQUIRE(loop->start());
    pid_t child = ::fork();
    if (child == 0) {
        bool sound = !loop->post([] {}) && !loop->start() && !loop->stop();
        sound &= !loop->is_alive(LivenessProbe::Clock::now());
        loop.reset();
        ::_exit(sound ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(loop->call([] {}, kLongMs));
}
#endif

}  // namespace
}  // namespace moonpool
