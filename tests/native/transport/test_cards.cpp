// Transfers of memory of cards, beyond what every kind of memory passes in test_conformance.cpp: cards that
// hang, die and refuse, memory that is taken away, and few slots of pinned memory.
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kCardMiB = 1u << 20;
const char* const kPaths[] = {"loopback", "tcp"};
const char* const kAllPaths[] = {"loopback", "tcp", "cuda_ipc"};

// What lies opposite of memory of a card, on a path that is tried.
MemoryKind opposite(const std::string& path) {
    return path == "cuda_ipc" ? MemoryKind::kDevice : MemoryKind::kHost;  // which reaches cards only
}

EngineOptions patient(const std::string& name, const std::string& transport, int timeout_ms) {
    EngineOptions options = engine_options(name, transport);
    options.timeout_ms = timeout_ms;
    return options;
}

}  // namespace

TEST_CASE("cards: what an address is, is asked of the driver") {
    Bed bed;
    {
        Pair pair("tcp");
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, kCardMiB));
        Pinned pinned(bed, 65536);
        std::vector<std::byte> heap(65536);
        Engine& engine = *pair.there;
        REQUIRE(engine.register_region(card.address() + 4096, 65536, "cuda:0").ok());
        REQUIRE(engine.register_region(pinned.address(), 65536, "cpu:0").ok());
        REQUIRE(engine.register_region(reinterpret_cast<uint64_t>(heap.data()), 65536, "cpu:0").ok());
        SegmentInfo seen = *pair.here->segment(pair.segment);
        REQUIRE(seen.regions.size() == 3);
        size_t on_card = 0;
        for (const SegmentRegion& region : seen.regions) {
            bool card_row = region.address == card.address() + 4096;
            on_card += card_row;
            // Pinned memory is the host's, for peers.
            CHECK(region.kind == (card_row ? MemoryKind::kDevice : MemoryKind::kHost));
            CHECK(region.transport == "tcp");
        }
        CHECK(on_card == 1);
        auto refused = [&](uint64_t address, uint64_t bytes, const char* why) {
            Status status = engine.register_region(address, bytes, "");
            REQUIRE_FALSE(status.ok());
            CHECK(status.error().code == Code::kInvalidArgument);
            CHECK_MESSAGE(status.error().text.find(why) != std::string::npos, status.error().text);
        };
        refused(card.address() + kCardMiB - 4096, 8192, "0x");  // beyond the allocation
        uint64_t managed = 0;
        auto* allocate = engine_call<int(uint64_t*, size_t, unsigned)>("cuMemAllocManaged");
        device::OnDevice here(*bed.device);
        REQUIRE(allocate(&managed, 65536, 1) == 0);
        refused(managed, 65536, "managed CUDA memory");
        REQUIRE(bed.device->driver().cuMemFree(managed) == 0);
        REQUIRE(engine.deregister_region(card.address() + 4096).ok());
        uint64_t freed = card.address();
        card = device::DeviceMemory();
        refused(freed, 4096, "0x");
        REQUIRE(engine.deregister_region(pinned.address()).ok());
    }
    bed.end();
}

TEST_CASE(
    "cards: without pinned memory a registration is refused with the reason, and the next one tries again") {
    Bed bed;
    {
        Pair pair("tcp");
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, kCardMiB));
        soft_device().soft_limit(UINT64_MAX, 0);
        Status status = pair.there->register_region(card.address(), kCardMiB, "");
        REQUIRE_FALSE(status.ok());
        CHECK_MESSAGE(status.error().text.find("no pinned memory") != std::string::npos, status.error().text);
        CHECK(status.error().text.find("CUDA card 0") != std::string::npos);
        soft_device().soft_limit(UINT64_MAX, UINT64_MAX);
        REQUIRE(pair.there->register_region(card.address(), kCardMiB, "").ok());
        REQUIRE(pair.there->deregister_region(card.address()).ok());
    }
    bed.end();
}

TEST_CASE("cards: a card that hangs costs its transfers their time, and keeps its memory registered") {
    for (const char* path : kAllPaths) {
        for (bool local : {false, true}) {
            CAPTURE(path);
            CAPTURE(local);
            Bed bed;
            {
                Pair pair(patient("here", path, 300), patient("there", "", 300));
                MemoryKind other = opposite(path), card = MemoryKind::kDevice;
                Memory mine(*pair.here, kCardMiB, local ? card : MemoryKind::kHost);
                Memory theirs(*pair.there, kCardMiB, local ? other : card);
                Engine& owner = local ? *pair.here : *pair.there;
                Memory& on_card = local ? mine : theirs;
                soft_device().soft_hang(1);
                std::vector<Slice> slices = {{mine.address(), theirs.address(), kCardMiB, Direction::kWrite}};
                uint64_t ticket = *pair.here->submit(pair.request(slices));  // waits for no card
                REQUIRE(*pair.here->wait(ticket, 20000));
                TicketStatus status = *pair.here->status(ticket);
                CHECK(status.state == TicketState::kFailed);
                CHECK_MESSAGE(status.failure.error.code == Code::kTimeout, status.failure.error.text);
                // Its copy may still run.
                Status gone = owner.deregister_region(on_card.address());
                REQUIRE_FALSE(gone.ok());
                CHECK(gone.error().code == Code::kTimeout);
                Engine& copies = std::strcmp(path, "cuda_ipc") == 0 ? *pair.here : owner;
                CHECK(*copies.has_abandoned_copies());
                CHECK(*pair.here->is_over(ticket) == (&copies != pair.here.get()));
                soft_device().soft_unhang();
                soft_device().soft_settle();
                while (*copies.has_abandoned_copies()) std::this_thread::yield();
                CHECK(*pair.here->is_over(ticket));
                REQUIRE(owner.deregister_region(on_card.address()).ok());
                REQUIRE(pair.here->release(ticket).ok());
            }
            bed.end();
        }
    }
}

TEST_CASE("cards: a card that dies fails each of its transfers once, and memory of the host is carried on") {
    for (const char* path : kPaths) {
        CAPTURE(path);
        Random random(2310);
        for (int round = 0; round < 4; ++round) {
            Bed bed(Policy::kShuffled, random.next());
            {
                Pair pair(path);
                Memory mine(*pair.here, 4 * kCardMiB, MemoryKind::kHost);
                Memory card(*pair.there, 4 * kCardMiB, MemoryKind::kDevice);
                Memory host(*pair.there, 4 * kCardMiB, MemoryKind::kHost);
                mine.fill(random);
                soft_device().soft_die(static_cast<int>(random.between(1, 6)), device::cu::kIllegalAddress);
                std::vector<uint64_t> tickets;
                std::vector<Slice> slices;
                slices.reserve(200);
                for (int i = 0; i < 100; ++i) {
                    uint64_t at = random.below(3 * kCardMiB);
                    slices.push_back({mine.address() + at, card.address() + at, random.between(1, kCardMiB),
                                      Direction::kWrite});
                    TransferRequest request = pair.request({});
                    request.slices = {&slices.back(), 1};
                    tickets.push_back(*pair.here->submit(request));
                }
                size_t failed = 0;
                for (uint64_t ticket : tickets) {
                    REQUIRE(*pair.here->wait(ticket, 20000));
                    TicketStatus status = *pair.here->status(ticket);
                    if (status.state == TicketState::kDone) continue;
                    ++failed;
                    CHECK_MESSAGE(status.failure.error.text.find("700") != std::string::npos,
                                  status.failure.error.text);
                }
                CHECK(failed >= 90);
                REQUIRE(*pair.transfer({{mine.address(), host.address(), 4 * kCardMiB, Direction::kWrite}}) ==
                        4 * kCardMiB);
                CHECK(host.bytes() == mine.bytes());
            }
            bed.forget();
        }
    }
}

TEST_CASE("cards: memory is free once deregister has returned, with copies of cards under way") {
    Random random(2311);
    for (const char* path : kAllPaths) {
        for (bool local : {false, true}) {
            CAPTURE(path);
            CAPTURE(local);
            Bed bed(Policy::kShuffled, random.next());
            {
                Pair pair(path);
                Memory stays(local ? *pair.there : *pair.here, 4 * kCardMiB, opposite(path));
                Engine& owner = local ? *pair.here : *pair.there;
                for (int round = 0; round < 3; ++round) {
                    device::DeviceMemory card =
                        device::must(device::DeviceMemory::allocate(bed.device, 4 * kCardMiB));
                    uint64_t goes = card.address();
                    REQUIRE(owner.register_region(goes, 4 * kCardMiB, "").ok());
                    std::atomic<int> moved{0};
                    std::vector<std::thread> threads;
                    for (uint64_t t = 0; t < 3; ++t) {
                        threads.emplace_back([&, t] {
                            for (;;) {
                                uint64_t a = (local ? goes : stays.address()) + t * kCardMiB;
                                uint64_t b = (local ? stays.address() : goes) + t * kCardMiB;
                                Direction d = t % 2 == 0 ? Direction::kRead : Direction::kWrite;
                                Result<uint64_t> result = pair.transfer({{a, b, kCardMiB, d}});
                                if (!result.ok()) {
                                    CHECK_MESSAGE(result.error().code == Code::kInvalidArgument,
                                                  path << ": " << result.error().text);
                                    return;
                                }
                                ++moved;
                            }
                        });
                    }
                    while (moved < 3) std::this_thread::yield();
                    REQUIRE(owner.deregister_region(goes).ok());
                    card = device::DeviceMemory();  // a copy that still uses it is a violation
                    for (std::thread& thread : threads) thread.join();
                }
            }
            bed.end();
        }
    }
}

TEST_CASE("cards: with two slots of pinned memory many transfers of both directions take turns") {
    Random random(2312);
    Bed bed(Policy::kShuffled, random.next());
    {
        EngineOptions mine = engine_options("here", "tcp");
        mine.connections_per_peer = 6;
        Pair pair(mine, engine_options("there", ""));
        constexpr size_t kThreads = 6, kPart = 3 * kCardMiB + 5;
        // The engines have a ring each: two slots of 8 MiB.
        soft_device().soft_limit(UINT64_MAX, 17u << 20);
        Memory a(*pair.here, kThreads * kPart, MemoryKind::kDevice);
        soft_device().soft_limit(UINT64_MAX, 33u << 20);
        Memory b(*pair.there, kThreads * kPart, MemoryKind::kDevice);
        a.fill(random);
        b.fill(random);
        std::vector<std::byte> before = a.bytes();
        std::vector<std::thread> threads;
        for (size_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                uint64_t at = t * kPart;
                for (int round = 0; round < 3; ++round) {
                    for (Direction direction : {Direction::kWrite, Direction::kRead}) {
                        std::vector<Slice> slices;
                        for (uint64_t i = 0; i < 3; ++i) {
                            uint64_t from = i * kCardMiB;
                            uint64_t n = i == 2 ? kPart - from : kCardMiB;
                            slices.push_back(
                                {a.address() + at + from, b.address() + at + from, n, direction});
                        }
                        Result<uint64_t> moved = pair.transfer(slices);
                        CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
                    }
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        CHECK(a.bytes() == before);
        CHECK(b.bytes() == before);
    }
    bed.end();
}

TEST_CASE(
    "cards: a transfer that was cancelled ends when its copies have, and a later one is not overwritten") {
    for (bool local : {false, true}) {
        CAPTURE(local);
        Bed bed;
        {
            Pair pair("loopback");
            MemoryKind host = MemoryKind::kHost, card = MemoryKind::kDevice;
            Memory mine(*pair.here, kCardMiB, local ? card : host);
            Memory theirs(*pair.there, kCardMiB, local ? host : card);
            Random random(2313);
            mine.fill(random);
            std::vector<std::byte> sent = mine.bytes();
            soft_device().soft_hang(1);
            std::vector<Slice> slices = {{mine.address(), theirs.address(), kCardMiB, Direction::kWrite}};
            uint64_t ticket = *pair.here->submit(pair.request(slices));
            while (soft_device().soft_calls("cuEventQuery") < 3) std::this_thread::yield();
            REQUIRE(pair.here->cancel(ticket).ok());
            CHECK_FALSE(*pair.here->wait(ticket, 200));  // its caller may use the memory again when it ends
            soft_device().soft_unhang();
            REQUIRE(*pair.here->wait(ticket, 20000));
            soft_device().soft_settle();
            CHECK(theirs.bytes() == sent);
            REQUIRE(pair.here->release(ticket).ok());
        }
        bed.end();
    }
}

TEST_CASE("cards: with two slots, engines that write to each other's cards wait for no slot of one another") {
    Random random(2314);
    Bed bed(Policy::kShuffled, random.next());
    {
        EngineOptions one = engine_options("one", "tcp"), other = engine_options("other", "tcp");
        std::shared_ptr<Engine> engines[2] = {make_engine(one), make_engine(other)};
        uint32_t segments[2] = {*engines[0]->open(engines[1]->addresses().front()),
                                *engines[1]->open(engines[0]->addresses().front())};
        constexpr size_t kPart = 20 * kCardMiB;  // three slots
        std::vector<std::unique_ptr<Memory>> memories;
        for (size_t i = 0; i < 2; ++i) {
            soft_device().soft_limit(UINT64_MAX, (17u << 20) + i * (16u << 20));
            memories.push_back(std::make_unique<Memory>(*engines[i], 4 * kPart, MemoryKind::kDevice));
            memories[i]->fill(random);
        }
        std::vector<std::byte> before[2] = {memories[0]->bytes(), memories[1]->bytes()};
        std::vector<std::thread> threads;
        for (size_t t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                size_t me = t % 2;
                uint64_t from = memories[me]->address() + (t / 2) * kPart;
                uint64_t to = memories[1 - me]->address() + (2 + t / 2) * kPart;
                TransferRequest request;
                std::vector<Slice> slices = {{from, to, kPart, Direction::kWrite}};
                request.segments = {&segments[me], 1};
                request.slices = slices;
                Result<uint64_t> moved = engines[me]->transfer(request);
                CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            });
        }
        for (std::thread& thread : threads) thread.join();
        for (size_t me : {0, 1}) {
            std::vector<std::byte> now = memories[1 - me]->bytes();
            CHECK(std::memcmp(now.data() + 2 * kPart, before[me].data(), 2 * kPart) == 0);
        }
    }
    bed.end();
}

TEST_CASE("cards: what comes after a copy that was given up is not overwritten by it") {
    for (const char* path : kPaths) {
        CAPTURE(path);
        Bed bed;
        {
            // A target is patient for less time than its initiator, which is told.
            Pair pair(patient("here", path, std::strcmp(path, "tcp") == 0 ? 20000 : 4000),
                      patient("there", "", 4000));
            Memory mine(*pair.here, 2 * kCardMiB, MemoryKind::kHost);
            Memory theirs(*pair.there, kCardMiB, MemoryKind::kDevice);
            std::memset(mine.data(), 1, kCardMiB);
            std::memset(mine.data() + kCardMiB, 2, kCardMiB);
            soft_device().soft_hang(1);
            Result<uint64_t> first =
                pair.transfer({{mine.address(), theirs.address(), kCardMiB, Direction::kWrite}});
            REQUIRE_FALSE(first.ok());
            CHECK_MESSAGE(first.error().code == Code::kTimeout, first.error().text);
            std::vector<Slice> slices = {
                {mine.address() + kCardMiB, theirs.address(), kCardMiB, Direction::kWrite}};
            int queued = soft_device().soft_calls("cuMemcpyAsync");
            uint64_t ticket = *pair.here->submit(pair.request(slices));
            while (soft_device().soft_calls("cuMemcpyAsync") == queued) std::this_thread::yield();
            soft_device().soft_unhang();
            REQUIRE(*pair.here->wait(ticket, 20000));
            TicketStatus status = *pair.here->status(ticket);
            REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
            soft_device().soft_settle();
            CHECK(theirs.data()[0] == std::byte{2});
            CHECK(theirs.data()[kCardMiB - 1] == std::byte{2});
            REQUIRE(pair.here->release(ticket).ok());
        }
        bed.end();
    }
}
