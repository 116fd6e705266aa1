// TCP: callers share the few connections to a peer. None of them waits for another's job, none ends it by a
// deadline of its own, and a peer that stands still costs nothing to others.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "bed.hpp"
#include "relay.hpp"
#include "transport/workers.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kShareMiB = 1u << 20;

// An engine, and a peer behind a cable.
struct Shared {
    std::shared_ptr<Engine> here, there;
    std::unique_ptr<Relay> relay;
    std::unique_ptr<Memory> mine, theirs;
    uint32_t segment = 0;

    explicit Shared(uint32_t connections, size_t size = 48 * kShareMiB) {
        EngineOptions options = engine_options("here", "tcp");
        options.connections_per_peer = connections;
        here = make_engine(options);
        there = make_engine(engine_options("there", ""));
        relay = std::make_unique<Relay>(there->addresses().front());
        mine = std::make_unique<Memory>(*here, size, MemoryKind::kHostArena);
        theirs = std::make_unique<Memory>(*there, size, MemoryKind::kHostArena);
        Random random(360);
        theirs->fill(random);
        std::memset(mine->data(), 0xEE, size);
        Result<uint32_t> opened = here->open(relay->address());
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment = *opened;
    }
    Slice slice(uint64_t at, uint64_t bytes, Direction direction = Direction::kRead) const {
        return {mine->address() + at, theirs->address() + at, bytes, direction};
    }
    TransferRequest request(const std::vector<Slice>& slices, int timeout_ms, bool background = false) const {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        request.timeout_ms = timeout_ms;
        request.background = background;
        return request;
    }
    Result<uint64_t> read(uint64_t at, uint64_t bytes, int timeout_ms) {
        std::vector<Slice> slices = {slice(at, bytes)};
        return here->transfer(request(slices, timeout_ms));
    }
    uint64_t submit(uint64_t at, uint64_t bytes, int timeout_ms, Direction direction = Direction::kRead) {
        std::vector<Slice> slices = {slice(at, bytes, direction)};
        return *here->submit(request(slices, timeout_ms));
    }
    bool same(uint64_t at, uint64_t bytes) const {
        return std::memcmp(mine->data() + at, theirs->data() + at, bytes) == 0;
    }
    void check_done(uint64_t ticket) {
        REQUIRE(*here->wait(ticket, 60000));
        TicketStatus status = *here->status(ticket);
        CHECK_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
    }
};

// Far more than a test can last.
std::vector<Slice> endless(const Shared& bed, Direction direction) {
    return std::vector<Slice>(100000, bed.slice(0, 16 * kShareMiB, direction));
}

}  // namespace

TEST_CASE("sharing: the foreground and messages come through beside endless background transfers") {
    for (Direction direction : {Direction::kRead, Direction::kWrite}) {
        for (bool submitted : {false, true}) {
            CAPTURE(submitted);
            Shared bed(2);
            if (direction == Direction::kWrite) {
                std::memcpy(bed.mine->data(), bed.theirs->data(), bed.mine->size());
                std::memset(bed.mine->data() + 20 * kShareMiB, 0xEE, 16384);
            }
            std::vector<Slice> slices = endless(bed, direction);
            std::vector<std::thread> callers;
            std::atomic<int> ended{0};
            for (int i = 0; i < 2; ++i) {
                if (submitted) {
                    REQUIRE(bed.here->submit(bed.request(slices, 60000, true)).ok());
                    continue;
                }
                callers.emplace_back([&] {
                    CHECK_FALSE(bed.here->transfer(bed.request(slices, 60000, true)).ok());
                    ++ended;
                });
            }
            auto moved = [&] {
                return metric(*bed.there, direction == Direction::kRead ? "served_tcp_read_bytes_total"
                                                                        : "served_tcp_write_bytes_total");
            };
            while (moved() < 4 * kShareMiB) std::this_thread::yield();
            for (uint64_t i = 0; i < 10; ++i) {
                uint64_t at = 20 * kShareMiB + i * 4096;
                Result<uint64_t> blocking = bed.read(at, 4096, 20000);
                REQUIRE_MESSAGE(blocking.ok(), (blocking.ok() ? "" : blocking.error().text));
                CHECK(bed.same(at, 4096));
                bed.check_done(bed.submit(22 * kShareMiB + i * 4096, 4096, 20000));
                REQUIRE(bed.here->notify(bed.segment, "between").ok());
                REQUIRE(bed.here->segment(bed.segment).ok());
            }
            CHECK(bed.there->notifications()->size() == 10);
            CHECK(ended == 0);
            CHECK(bed.here->close().ok());
            for (std::thread& caller : callers) caller.join();
        }
    }
}

TEST_CASE("sharing: a caller beside large foreground transfers of others has its turn") {
    Shared bed(1);
    std::vector<Slice> slices = endless(bed, Direction::kRead);
    std::thread caller([&] { CHECK_FALSE(bed.here->transfer(bed.request(slices, 60000)).ok()); });
    while (metric(*bed.there, "served_tcp_read_bytes_total") < 20 * kShareMiB) std::this_thread::yield();
    Result<uint64_t> moved = bed.read(20 * kShareMiB, 4096, 20000);
    CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
    CHECK(bed.same(20 * kShareMiB, 4096));
    CHECK(bed.here->close().ok());
    caller.join();
}

TEST_CASE("sharing: a deadline ends its own job, and not the connection") {
    for (bool short_first : {true, false}) {
        for (bool waits : {true, false}) {
            CAPTURE(short_first);
            CAPTURE(waits);
            Shared bed(1);
            bed.relay->cut(0);
            uint64_t patient = 0;
            if (!short_first) patient = bed.submit(0, 4 * kShareMiB, 600000);
            std::thread later;
            if (waits) {
                if (short_first) later = std::thread([&] { patient = bed.submit(0, 4 * kShareMiB, 600000); });
                Result<uint64_t> moved = bed.read(8 * kShareMiB, kShareMiB, 1000);
                REQUIRE_FALSE(moved.ok());
                CHECK(moved.error().code == Code::kTimeout);
            } else {
                uint64_t impatient = bed.submit(8 * kShareMiB, kShareMiB, 1000);
                if (short_first) patient = bed.submit(0, 4 * kShareMiB, 600000);
                REQUIRE(*bed.here->wait(impatient, 60000));
                CHECK(bed.here->status(impatient)->failure.error.code == Code::kTimeout);
            }
            if (later.joinable()) later.join();
            CHECK_FALSE(*bed.here->wait(patient, 0));
            bed.relay->join(0);
            bed.check_done(patient);
            CHECK(bed.same(0, 4 * kShareMiB));
            // The answer that came too late was thrown away, and the connection is the same.
            REQUIRE(all_are(std::byte{0xEE}, bed.mine->data() + 8 * kShareMiB, kShareMiB));
            CHECK(bed.relay->connections() == 1);
            CHECK(metric(*bed.here, "retries_total") == 0);
        }
    }
}

TEST_CASE("sharing: a cancelled job and a closed region take nothing from their neighbours") {
    for (bool cancelled : {true, false}) {
        CAPTURE(cancelled);
        Shared bed(1);
        Memory other(*bed.here, 4 * kShareMiB, MemoryKind::kHostArena);
        bed.relay->cut(0);
        std::vector<Slice> into_other = {
            {other.address(), bed.theirs->address(), 4 * kShareMiB, Direction::kRead}};
        uint64_t gone = *bed.here->submit(bed.request(into_other, 600000));
        uint64_t neighbour = bed.submit(0, 8 * kShareMiB, 600000);
        if (cancelled) {
            REQUIRE(bed.here->cancel(gone).ok());
            REQUIRE(*bed.here->wait(gone, 60000));
            CHECK(bed.here->status(gone)->state == TicketState::kCancelled);
        } else {
            REQUIRE(bed.here->deregister_region(other.address()).ok());
            std::memset(other.data(), 0x55, other.size());
        }
        bed.relay->join(0);
        bed.check_done(neighbour);
        CHECK(bed.same(0, 8 * kShareMiB));
        REQUIRE(*bed.here->wait(gone, 60000));
        if (!cancelled) {
            CHECK(bed.here->status(gone)->failure.error.code == Code::kInvalidArgument);
            REQUIRE(all_are(std::byte{0x55}, other.data(), other.size()));
        }
        CHECK(bed.relay->connections() == 1);
        CHECK(metric(*bed.here, "retries_total") == 0);
    }
}

TEST_CASE("sharing: a large slice goes over all connections, and over those that are left") {
    constexpr size_t kSize = 96 * kShareMiB;
    for (int which = 0; which < 8; ++which) {
        bool lossy = (which & 1) != 0, waits = (which & 2) != 0, read = (which & 4) != 0;
        CAPTURE(which);
        Shared bed(4, kSize);
        Direction direction = read ? Direction::kRead : Direction::kWrite;
        if (lossy) bed.relay->reset_after(1, read ? 700 : 5 * kShareMiB);  // a few questions, a few frames
        std::vector<Slice> slices = {bed.slice(0, kSize, direction)};
        TransferRequest request = bed.request(slices, 60000);
        if (waits) {
            Result<uint64_t> moved = bed.here->transfer(request);
            REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            CHECK(*moved == kSize);
        } else {
            uint64_t ticket = *bed.here->submit(request);
            bed.check_done(ticket);
            CHECK(bed.here->status(ticket)->bytes_done == kSize);
        }
        CHECK(bed.same(0, kSize));
        CHECK(metric(*bed.here, read ? "tcp_read_bytes_total" : "tcp_write_bytes_total") == kSize);
        if (lossy) continue;
        CHECK(bed.relay->connections() == 4);
        for (size_t i = 0; i < 4; ++i) {
            CHECK((read ? bed.relay->brought(i) : bed.relay->took(i)) >= kSize / 32);
        }
    }
}

TEST_CASE("sharing: messages and dialling do not queue behind peers that stand still") {
    constexpr size_t kDead = 20;
    Shared bed(2);
    std::vector<std::shared_ptr<Engine>> peers;
    std::vector<std::unique_ptr<Relay>> cables;
    std::vector<uint64_t> tickets;
    for (size_t i = 0; i < kDead; ++i) {
        peers.push_back(make_engine(engine_options("dead", "")));
        cables.push_back(std::make_unique<Relay>(peers.back()->addresses().front()));
        uint32_t segment = *bed.here->open(cables.back()->address());
        // Its connection is gone, and no other is answered.
        cables.back()->cut_all();
        cables.back()->reset(0);
        std::vector<Slice> slices = {bed.slice(0, 4096)};
        TransferRequest request = bed.request(slices, 600000);
        request.segments = {&segment, 1};
        tickets.push_back(*bed.here->submit(request));
    }
    bed.relay->reset(0);
    for (int i = 0; i < 3; ++i) {
        std::vector<Slice> slices = {bed.slice(kShareMiB, 4096)};
        TransferRequest request = bed.request(slices, 60000);
        request.notify = "through";
        uint64_t ticket = *bed.here->submit(request);
        bed.check_done(ticket);
    }
    CHECK(bed.there->notifications()->size() == 3);
    for (uint64_t ticket : tickets) {
        CHECK_FALSE(*bed.here->wait(ticket, 0));
        REQUIRE(bed.here->cancel(ticket).ok());
        REQUIRE(*bed.here->wait(ticket, 60000));
    }
}

TEST_CASE("sharing: a write whose time is up costs its connection once nothing moves there, and is fenced") {
    Shared bed(1);
    bed.relay->cut(0);
    // More than the kernels' buffers take: half of a frame is on its way.
    uint64_t late = bed.submit(16 * kShareMiB, 32 * kShareMiB, 500, Direction::kWrite);
    uint64_t patient = bed.submit(0, 4 * kShareMiB, 600000);
    REQUIRE(*bed.here->wait(late, 60000));
    CHECK(bed.here->status(late)->state == TicketState::kFailed);
    std::vector<std::byte> now = bed.theirs->bytes();
    bed.check_done(patient);  // over a new connection
    bed.relay->join(0);
    REQUIRE(bed.here->notify(bed.segment, "behind what was left").ok());
    CHECK(metric(*bed.there, "fenced_total") >= 1);
    CHECK(bed.theirs->bytes() == now);
}

TEST_CASE("lane: a peer holds a few threads at most") {
    transport::Workers workers(8);
    transport::Lane still(workers, 2), healthy(workers, 2);
    std::mutex mutex;
    std::condition_variable changed;
    int inside = 0, most = 0, ended = 0;
    bool released = false;
    auto until = [&](auto condition) {
        std::unique_lock lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(30), condition);
    };
    for (int i = 0; i < 20; ++i) {
        still.post(i % 2 == 0, [&] {
            std::unique_lock lock(mutex);
            most = std::max(most, ++inside);
            changed.wait_for(lock, std::chrono::seconds(30), [&] { return released; });
            --inside;
            ++ended;
            changed.notify_all();
        });
    }
    bool done = false;
    healthy.post(true, [&] {
        std::lock_guard lock(mutex);
        done = true;
        changed.notify_all();
    });
    CHECK(until([&] { return done; }));
    {
        std::lock_guard lock(mutex);
        CHECK(ended == 0);
        released = true;
        changed.notify_all();
    }
    CHECK(until([&] { return ended == 20; }));
    CHECK(most <= 2);
    CHECK(workers.stop(std::chrono::steady_clock::time_point::max()));
}
