// What a failed write may still do: the error says whether it is settled, and the owner of memory can keep a
// peer out of it.
#include <chrono>
#include <thread>

#include "bed.hpp"
#include "relay.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kMiB = 1u << 20;

size_t count(Memory& memory, std::byte value) {
    return static_cast<size_t>(std::count(memory.data(), memory.data() + memory.size(), value));
}

// A writer behind a cable, and the owner of what it writes to.
struct Late {
    std::shared_ptr<Engine> here, there;
    std::unique_ptr<Relay> relay;
    std::unique_ptr<Memory> mine, theirs;
    uint32_t segment = 0;

    explicit Late(size_t size = 8 * kMiB) {
        here = make_engine(engine_options("here", "tcp"));
        there = make_engine(engine_options("there", ""));
        relay = std::make_unique<Relay>(there->addresses().front());
        mine = std::make_unique<Memory>(*here, size, MemoryKind::kHostArena);
        theirs = std::make_unique<Memory>(*there, size, MemoryKind::kHostArena);
        std::memset(mine->data(), 0x55, size);
        segment = *here->open(relay->address());
        CHECK(write(8, 10000).ok());
    }
    TicketStatus status;
    Result<uint64_t> write(uint64_t bytes, int timeout_ms, Direction direction = Direction::kWrite) {
        std::vector<Slice> slices = {{mine->address(), theirs->address(), bytes, direction}};
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        request.timeout_ms = timeout_ms;
        status = {};
        return here->transfer(request, &status);
    }
};

}  // namespace

TEST_CASE("late bytes: a write that failed over a cut cable is not settled before the peer has answered") {
    Late bed;
    bed.relay->cut_all();
    REQUIRE_FALSE(bed.write(8 * kMiB, 500).ok());
    CHECK(bed.status.state == TicketState::kFailed);
    CHECK_FALSE(bed.status.failure.settled);
    // A read moves nothing to the peer; what it could do here is over.
    REQUIRE_FALSE(bed.write(8 * kMiB, 300, Direction::kRead).ok());
    CHECK(bed.status.failure.settled);
    // The same of a ticket, which no caller's thread ends.
    std::vector<Slice> slices = {{bed.mine->address(), bed.theirs->address(), kMiB, Direction::kWrite}};
    TransferRequest request;
    request.segments = {&bed.segment, 1};
    request.slices = slices;
    request.timeout_ms = 300;
    uint64_t ticket = *bed.here->submit(request);
    REQUIRE(*bed.here->wait(ticket, 60000));
    CHECK(bed.here->status(ticket)->state == TicketState::kFailed);
    CHECK_FALSE(bed.here->status(ticket)->failure.settled);
    // From the next answer on nothing of it lands any more.
    bed.relay->join();
    while (!bed.here->notify(bed.segment, "reached")) (void)readable(bed.here->event_fd(), 20);
    std::memset(bed.theirs->data(), 0xAA, bed.theirs->size());
    REQUIRE(bed.write(8, 10000).ok());
    CHECK(count(*bed.theirs, std::byte{0x55}) == 8);
}

TEST_CASE("late bytes: where one connection fails, another asks the peer, and the error is settled") {
    Late bed;
    // Every connection that carries more than a handshake stands still; each is left, and fenced by the next.
    bed.relay->cut(0);
    for (size_t i = 1; i < 40; ++i) bed.relay->cut_after(i, 100000);
    REQUIRE_FALSE(bed.write(8 * kMiB, 1000).ok());
    CHECK(bed.status.state == TicketState::kFailed);
    REQUIRE(bed.status.failure.settled);
    CHECK(metric(*bed.there, "fenced_total") >= 1);
    std::memset(bed.theirs->data(), 0xAA, bed.theirs->size());
    bed.relay->join(0);  // all that lies in the cables comes
    bed.relay->join();
    while (!bed.here->notify(bed.segment, "reached")) (void)readable(bed.here->event_fd(), 20);
    CHECK(count(*bed.theirs, std::byte{0x55}) == 0);
}

TEST_CASE("late bytes: a refused slice is settled, on every transport") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
        std::vector<Slice> slices = {{mine.address(), theirs.address() + 4000, 4096, Direction::kWrite}};
        TicketStatus status;
        REQUIRE_FALSE(pair.here->transfer(pair.request(slices), &status).ok());
        CHECK(status.failure.settled);
    });
}

TEST_CASE("late bytes: an engine that was shut out reaches nothing, over any path, until it is admitted") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHostArena);
        auto other = make_engine(engine_options("other", transport));
        Memory others(*other, 4096, MemoryKind::kHost);
        uint32_t their = *other->open(pair.there->addresses().front());
        std::vector<Slice> slices = {{mine.address(), theirs.address(), 4096, Direction::kWrite}};
        std::vector<Slice> of_other = {{others.address(), theirs.address(), 4096, Direction::kWrite}};
        TransferRequest beside;
        beside.segments = {&their, 1};
        beside.slices = of_other;
        REQUIRE(pair.transfer(slices).ok());
        REQUIRE(other->transfer(beside).ok());
        for (int round = 0; round < 2; ++round) {
            REQUIRE(pair.there->shut_out(pair.here->segment_id()).ok());
            REQUIRE_FALSE(pair.transfer(slices).ok());
            REQUIRE_FALSE(pair.transfer({{mine.address(), theirs.address(), 8, Direction::kRead}}).ok());
            // Nor by a new connection, nor one of another transport.
            CHECK_FALSE(pair.here->open(pair.there->addresses().front()).ok());
            // Another engine is not concerned.
            Result<uint64_t> moved = other->transfer(beside);
            CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            REQUIRE(pair.there->admit(pair.here->segment_id()).ok());
            pair.segment = *pair.here->open(pair.there->addresses().front());
            moved = pair.transfer(slices);
            CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        }
        CHECK(pair.there->shut_out(pair.there->segment_id()).error().code == Code::kInvalidArgument);
        // What the owner does with the other's memory goes on.
        REQUIRE(pair.there->shut_out(pair.here->segment_id()).ok());
        uint32_t back = *pair.there->open(pair.here->addresses().front());
        std::vector<Slice> reads = {{theirs.address(), mine.address(), 8, Direction::kRead}};
        TransferRequest request;
        request.segments = {&back, 1};
        request.slices = reads;
        if (!theirs.on_card()) CHECK(pair.there->transfer(request).ok());
    });
}

TEST_CASE("late bytes: no byte of an engine that was shut out lands, though it never stops to try") {
    each_host_transport([](const std::string& transport) {
        for (MemoryKind kind : {MemoryKind::kHostArena, MemoryKind::kHost}) {
            CAPTURE(kind_name(kind));
            Pair pair(transport);
            constexpr size_t kSize = 4 * kMiB;
            Memory mine(*pair.here, kSize, MemoryKind::kHost), theirs(*pair.there, kSize, kind);
            std::memset(mine.data(), 0x55, kSize);
            for (int round = 0; round < 3; ++round) {
                std::atomic<int> moved{0};
                std::atomic<bool> over{false};
                std::vector<std::thread> threads;
                for (uint64_t t = 0; t < 3; ++t) {
                    threads.emplace_back([&, t] {
                        while (!over) {
                            uint64_t at = t * kMiB;
                            std::vector<Slice> slices = {
                                {mine.address() + at, theirs.address() + at, kMiB, Direction::kWrite}};
                            if (pair.transfer(slices).ok()) ++moved;
                        }
                    });
                }
                while (moved < 3) std::this_thread::yield();
                REQUIRE(pair.there->shut_out(pair.here->segment_id()).ok());
                std::memset(theirs.data(), 0xAA, kSize);  // whoever still writes races with this
                for (int look = 0; look < 3; ++look) {
                    REQUIRE(std::memchr(theirs.data(), 0x55, kSize) == nullptr);
                    std::this_thread::yield();
                }
                over = true;
                for (std::thread& thread : threads) thread.join();
                REQUIRE(std::memchr(theirs.data(), 0x55, kSize) == nullptr);
                REQUIRE(pair.there->admit(pair.here->segment_id()).ok());
                REQUIRE(pair.here->close_segment(pair.segment).ok());
                pair.segment = *pair.here->open(pair.there->addresses().front());
            }
        }
    });
}

TEST_CASE("engine: the peers of a transfer are told at the same time, with its deadline") {
    // Of eight peers six do not answer; each alone would cost the deadline of the transfer.
    auto here = make_engine(engine_options("here", "tcp"));
    Memory mine(*here, 4096, MemoryKind::kHostArena);
    std::vector<std::shared_ptr<Engine>> peers;
    std::vector<std::unique_ptr<Relay>> relays;
    std::vector<std::unique_ptr<Memory>> theirs;
    std::vector<uint32_t> segments;
    std::vector<Slice> slices;
    for (int i = 0; i < 8; ++i) {
        peers.push_back(make_engine(engine_options("peer", "")));
        relays.push_back(std::make_unique<Relay>(peers.back()->addresses().front()));
        theirs.push_back(std::make_unique<Memory>(*peers.back(), 4096, MemoryKind::kHostArena));
        segments.push_back(*here->open(relays.back()->address()));
        // Nothing reaches a peer for it, so that the data is there at once.
        slices.push_back({mine.address(), theirs.back()->address(), 0, Direction::kWrite});
        if (i >= 2) relays.back()->cut_all();
    }
    TransferRequest request;
    request.segments = segments;
    request.slices = slices;
    request.notify = "told";
    request.timeout_ms = 2000;  // the engine's is 10 s
    auto start = std::chrono::steady_clock::now();
    uint64_t ticket = *here->submit(request);
    REQUIRE(*here->wait(ticket, 100000));
    double spent_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    MESSAGE("six peers that do not answer cost " << spent_s << " s");
    CHECK(spent_s < 9);  // one after the other: 12 s, with the engine's deadline 60 s
    TicketStatus status = *here->status(ticket);
    CHECK(status.state == TicketState::kFailed);
    CHECK(status.failure.error.text.find("notification") != std::string::npos);
    for (int i = 0; i < 2; ++i) CHECK(peers[static_cast<size_t>(i)]->notifications()->size() == 1);
    // The caller's own thread: the same deadline.
    request.segments = {&segments[5], 1};
    request.slices = {&slices[5], 1};
    start = std::chrono::steady_clock::now();
    CHECK_FALSE(here->transfer(request).ok());
    spent_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(spent_s < 9);
    request.timeout_ms = -1;
    CHECK(here->transfer(request).error().code == Code::kInvalidArgument);
}
