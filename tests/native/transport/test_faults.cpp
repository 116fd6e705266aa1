// TCP when the cable is bad: a connection that breaks or stands still half way costs that connection, not the
// transfer; one that stays dead costs the deadline and no more.
#include <chrono>
#include <functional>
#include <iostream>

#include "bed.hpp"
#include "relay.hpp"
#include "transport/workers.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kMiB = 1u << 20;

struct Cabled {
    std::shared_ptr<Engine> here, there;
    std::unique_ptr<Relay> relay;
    uint32_t segment = 0;
    std::unique_ptr<Memory> mine, theirs;

    explicit Cabled(int timeout_ms, MemoryKind target = MemoryKind::kHost, size_t size = 24 * kMiB) {
        EngineOptions options = engine_options("here", "tcp");
        options.timeout_ms = timeout_ms;
        here = make_engine(options);
        there = make_engine(engine_options("there", ""));
        relay = std::make_unique<Relay>(there->addresses().front());
        mine = std::make_unique<Memory>(*here, size, MemoryKind::kHostArena);
        theirs = std::make_unique<Memory>(*there, size, target);
    }
    void open() {
        Result<uint32_t> opened = here->open(relay->address());
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment = *opened;
    }

    std::vector<Slice> whole(Direction direction) const {
        std::vector<Slice> slices;
        for (size_t at = 0; at < mine->size(); at += 3 * kMiB) {
            slices.push_back({mine->address() + at, theirs->address() + at, 3 * kMiB, direction});
        }
        return slices;
    }
    TransferRequest request(const std::vector<Slice>& slices) const {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        return request;
    }
    // The connections share the slices of a transfer, so one that is slow may carry less of it than what the
    // relay waits for: it is repeated until that has come about.
    void repeat_until(const std::vector<Slice>& slices, const std::function<bool()>& done) const {
        for (int i = 0; i < 20 && !done(); ++i) REQUIRE(here->transfer(request(slices)).ok());
        CHECK(done());
    }
};

// With the target's memory of the host, and of a card.
void each_target(const std::function<void(MemoryKind target)>& body) {
    body(MemoryKind::kHost);
    Random random(339);
    Bed card(Policy::kShuffled, random.next());
    body(MemoryKind::kDevice);
    card.end();
}

double since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("tcp: a connection that is reset half way is replaced within the same transfer") {
    each_target([&](MemoryKind target) {
        for (Direction direction : {Direction::kWrite, Direction::kRead}) {
            for (bool waits : {true, false}) {
                CAPTURE(waits);
                Random random(340);
                Cabled bed(10000, target);
                // The questions of a read are small: it is reset in the middle of one.
                bed.relay->reset_after(0, direction == Direction::kWrite ? 10 * kMiB : 500);
                bed.relay->reset_after(1, direction == Direction::kWrite ? 5 * kMiB : 450);
                bed.open();
                bed.mine->fill(random);
                bed.theirs->fill(random);
                std::vector<std::byte> expected =
                    direction == Direction::kWrite ? bed.mine->bytes() : bed.theirs->bytes();
                std::vector<Slice> slices = bed.whole(direction);
                if (waits) {
                    Result<uint64_t> moved = bed.here->transfer(bed.request(slices));
                    REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
                    CHECK(*moved == bed.mine->size());
                } else {
                    uint64_t ticket = *bed.here->submit(bed.request(slices));
                    REQUIRE(*bed.here->wait(ticket, 20000));
                    TicketStatus status = *bed.here->status(ticket);
                    REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
                    CHECK(status.bytes_done == bed.mine->size());
                }
                bed.repeat_until(slices, [&] {
                    return metric(*bed.here, "retries_total") >= 1 && bed.relay->connections() >= 3 &&
                           (direction == Direction::kRead || metric(*bed.there, "fenced_total") >= 1);
                });
                CHECK(bed.mine->bytes() == expected);
                CHECK(bed.theirs->bytes() == expected);
            }
        }
    });
}

TEST_CASE("tcp: a connection that stands still is left in time for another") {
    each_target([&](MemoryKind target) {
        for (bool waits : {true, false}) {
            CAPTURE(waits);
            Random random(341);
            Cabled bed(4000, target);
            bed.relay->cut_after(0, 10 * kMiB);
            bed.open();
            bed.mine->fill(random);
            std::vector<Slice> slices = bed.whole(Direction::kWrite);
            if (waits) {
                Result<uint64_t> moved = bed.here->transfer(bed.request(slices));
                REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            } else {
                uint64_t ticket = *bed.here->submit(bed.request(slices));
                REQUIRE(*bed.here->wait(ticket, 20000));
                TicketStatus status = *bed.here->status(ticket);
                REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
            }
            // What the dead connection still holds is fenced: it can come late without harm.
            bed.repeat_until(slices, [&] { return metric(*bed.there, "fenced_total") >= 1; });
            std::vector<std::byte> sent = bed.mine->bytes();
            CHECK(bed.theirs->bytes() == sent);
            std::memset(bed.mine->data(), 7, bed.mine->size());
            REQUIRE(bed.here->transfer(bed.request(slices)).ok());
            bed.relay->join();
            REQUIRE(bed.here->notify(bed.segment, "through").ok());
            CHECK(bed.theirs->bytes() == bed.mine->bytes());
        }
    });
}

TEST_CASE("tcp: a cable that stays cut costs the deadline, measured from progress") {
    Random random(342);
    Cabled bed(10000);
    bed.open();
    std::vector<Slice> slices = bed.whole(Direction::kWrite);
    REQUIRE(bed.here->transfer(bed.request(slices)).ok());
    bed.relay->cut_all();
    TransferRequest request = bed.request(slices);
    request.timeout_ms = 1000;
    auto start = std::chrono::steady_clock::now();
    Result<uint64_t> moved = bed.here->transfer(request);
    double spent_s = since(start);
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kTimeout);
    CHECK(moved.error().text.find("; tcp 127.0.0.1:") != std::string::npos);
    std::cerr << "a cut cable with a deadline of 1 s cost " << spent_s << " s: " << moved.error().text
              << "\n";
    CHECK(spent_s < 5);
    bed.relay->join();
    moved = bed.here->transfer(bed.request(slices));
    // For half a second after a timeout others are told at once that the peer is out of reach.
    start = std::chrono::steady_clock::now();
    while (!moved.ok() && since(start) < 10) {
        (void)readable(bed.here->event_fd(), 20);
        moved = bed.here->transfer(bed.request(slices));
    }
    CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
}

TEST_CASE("tcp: a cancelled transfer over a dead cable ends all the same") {
    Cabled bed(60000);
    bed.open();
    bed.relay->cut_all();
    std::vector<Slice> slices = bed.whole(Direction::kRead);
    uint64_t ticket = *bed.here->submit(bed.request(slices));
    REQUIRE(bed.here->cancel(ticket).ok());
    REQUIRE(*bed.here->wait(ticket, 10000));
    TicketStatus status = *bed.here->status(ticket);
    CHECK(status.state == TicketState::kCancelled);
    for (SliceState state : status.slices) CHECK(state == SliceState::kCancelled);
}

TEST_CASE("tcp: another engine at the address is not taken for the old one") {
    Cabled bed(2000, MemoryKind::kHost, kMiB * 3);
    bed.open();
    std::string address = bed.there->addresses().front();
    Result<uint32_t> opened = bed.here->open(address);
    REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
    uint32_t segment = *opened;
    uint64_t remote = bed.theirs->address();
    (void)bed.there->close();
    EngineOptions options = engine_options("second", "");
    options.listen = {address};
    auto second = make_engine(options);
    std::vector<Slice> slices = {{bed.mine->address(), remote, 100, Direction::kWrite}};
    TransferRequest request;
    request.segments = {&segment, 1};
    request.slices = slices;
    Result<uint64_t> moved = bed.here->transfer(request);
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kUnavailable);
    CHECK(moved.error().text.find("open it again") != std::string::npos);
    CHECK(bed.here->open(address).ok());
}

TEST_CASE("tcp: close ends a message and a handshake that wait for a peer which stands still") {
    EngineOptions options = engine_options("here", "tcp");
    options.timeout_ms = 600000;
    auto here = make_engine(options);
    auto there = make_engine(engine_options("there", ""));
    Relay relay(there->addresses().front());
    uint32_t segment = *here->open(relay.address());
    relay.cut_all();
    std::vector<std::thread> callers;
    std::atomic<int> begun{0}, ended{0};
    for (int i = 0; i < 4; ++i) {  // the first has the connection, the second makes one, others wait for them
        callers.emplace_back([&] {
            ++begun;
            Status status = here->notify(segment, "never");
            CHECK_FALSE(status.ok());
            ++ended;
        });
    }
    while (begun != 4) std::this_thread::yield();
    (void)here->close();
    for (std::thread& caller : callers) caller.join();
    CHECK(ended == 4);
}

TEST_CASE("workers: a burst is worked on by as many threads as may be, also when one was idle") {
    constexpr int kThreads = 12;
    for (int round = 0; round < 20; ++round) {
        std::mutex mutex;
        std::condition_variable changed;
        int inside = 0, ended = 0;
        bool together = true;
        auto wait = [&](auto until) {
            std::unique_lock lock(mutex);
            return changed.wait_for(lock, std::chrono::seconds(30), until);
        };
        auto count = [&](int& number) {
            std::lock_guard lock(mutex);
            ++number;
            changed.notify_all();
        };
        transport::Workers workers(kThreads);
        workers.post(false, [&] { count(ended); });
        REQUIRE(wait([&] { return ended == 1; }));
        for (int i = 0; i < round; ++i) std::this_thread::yield();  // it is idle now, or about to be
        // Each waits until all are inside at the same time.
        for (int i = 0; i < kThreads; ++i) {
            workers.post(false, [&] {
                count(inside);
                bool met = wait([&] { return inside == kThreads || !together; });
                std::lock_guard lock(mutex);
                together = together && met;
                ++ended;
                changed.notify_all();
            });
        }
        REQUIRE(wait([&] { return ended == kThreads + 1; }));
        REQUIRE(together);
    }
}
