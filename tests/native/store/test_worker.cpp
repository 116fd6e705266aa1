#include <doctest/doctest.h>
#include <poll.h>

#include <future>
#include <set>

#include "store/client/worker.hpp"

using namespace moonpool;

namespace {

bool readable(int fd, int timeout_ms) {
    pollfd p{fd, POLLIN, 0};
    return ::poll(&p, 1, timeout_ms) == 1;
}

}  // namespace

TEST_CASE("worker: every ticket ends once, and the eventfd tells") {
    Worker worker(2, 1000);
    std::atomic<int> ran{0};
    std::set<uint64_t> open;
    for (int i = 0; i < 500; ++i) open.insert(*worker.submit([&ran] { ++ran; }));
    CHECK(open.size() == 500);
    while (!open.empty()) {
        REQUIRE(readable(worker.event_fd(), 10000));
        for (uint64_t ticket : worker.poll()) REQUIRE(open.erase(ticket) == 1);
    }
    CHECK(ran == 500);
    CHECK(worker.poll().empty());
    CHECK_FALSE(readable(worker.event_fd(), 0));
}

TEST_CASE("worker: one thread keeps the order") {
    Worker worker(1, 100);
    std::vector<int> order;
    uint64_t last = 0;
    for (int i = 0; i < 100; ++i) last = *worker.submit([&order, i] { order.push_back(i); });
    for (bool done = false; !done;) {
        REQUIRE(readable(worker.event_fd(), 10000));
        for (uint64_t ticket : worker.poll()) done |= ticket == last;
    }
    for (int i = 0; i < 100; ++i) REQUIRE(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("worker: an operation that goes on elsewhere ends there, and close() waits for it") {
    Worker worker(1, 100);
    std::promise<Worker::Running> handed;
    uint64_t first = *worker.submit([&](Worker::Running running) { handed.set_value(std::move(running)); });
    Worker::Running elsewhere = handed.get_future().get();
    uint64_t second = *worker.submit([] {});
    REQUIRE(readable(worker.event_fd(), 10000));
    CHECK(worker.poll() == std::vector<uint64_t>{second});
    elsewhere = nullptr;
    REQUIRE(readable(worker.event_fd(), 10000));
    CHECK(worker.poll() == std::vector<uint64_t>{first});

    std::promise<Worker::Running> again;
    REQUIRE(worker.submit([&](Worker::Running running) { again.set_value(std::move(running)); }));
    elsewhere = again.get_future().get();
    std::future<void> closed = std::async(std::launch::async, [&] { worker.close(); });
    CHECK(closed.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    elsewhere = nullptr;
    closed.get();
}

TEST_CASE("worker: a full queue refuses, close() drops what waits and ends what runs") {
    std::promise<void> gate;
    std::shared_future<void> opened = gate.get_future().share();
    std::promise<void> started;
    std::atomic<int> ran{0};
    auto worker = std::make_unique<Worker>(1, 2);
    REQUIRE(worker->submit([&] {
        started.set_value();
        opened.wait();
        ++ran;
    }));
    started.get_future().wait();
    REQUIRE(worker->submit([&ran] { ++ran; }));
    REQUIRE(worker->submit([&ran] { ++ran; }));
    auto refused = worker->submit([&ran] { ++ran; });
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Code::kTooLarge);
    std::thread closer([&] { worker->close(); });
    Result<uint64_t> late = worker->submit([] {});
    while (late.ok() || late.error().code == Code::kTooLarge) late = worker->submit([] {});
    CHECK(late.error().code == Code::kClosed);
    gate.set_value();
    closer.join();
    CHECK(ran == 1);
    worker->close();  // twice is harmless
}
