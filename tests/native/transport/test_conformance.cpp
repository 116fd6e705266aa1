// The one suite that every transport of the registry passes, with memory of both kinds on either side.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kMiB = 1u << 20;

}  // namespace

TEST_CASE("transport: what is written arrives, what is read is there, and it went that way") {
    each_transport([](const std::string& transport) {
        each_kinds(transport, [&](MemoryKind mine_kind, MemoryKind their_kind) {
            Random random(300);
            Pair pair(transport);
            Memory mine(*pair.here, 3 * kMiB, mine_kind), theirs(*pair.there, 3 * kMiB, their_kind);
            mine.fill(random);
            theirs.fill(random);
            std::vector<std::byte> sent = mine.bytes(), kept = theirs.bytes();
            uint64_t a = mine.address(), b = theirs.address();
            REQUIRE(*pair.transfer({{a, b, kMiB, Direction::kWrite}}) == kMiB);
            CHECK(std::memcmp(theirs.data(), sent.data(), kMiB) == 0);
            CHECK(std::memcmp(theirs.data() + kMiB, kept.data() + kMiB, 2 * kMiB) == 0);
            REQUIRE(*pair.transfer({{a + kMiB, b + kMiB, 2 * kMiB, Direction::kRead}}) == 2 * kMiB);
            CHECK(std::memcmp(mine.data() + kMiB, kept.data() + kMiB, 2 * kMiB) == 0);
            CHECK(std::memcmp(mine.data(), sent.data(), kMiB) == 0);
            CHECK(metric(*pair.here, transport + "_write_bytes_total") == kMiB);
            CHECK(metric(*pair.here, transport + "_read_bytes_total") == 2 * kMiB);
            uint64_t all = 0;
            for (const auto& [other, why] : pair.here->transports()) {
                all += metric(*pair.here, other + "_write_bytes_total");
            }
            CHECK(all == kMiB);
        });
    });
}

TEST_CASE("transport: every size from nothing to 64 MiB, at every alignment") {
    each_transport([](const std::string& transport) {
        Random random(301);
        Pair pair(transport);
        size_t room = 64 * kMiB + 64;
        Memory mine(*pair.here, room, MemoryKind::kHost), theirs(*pair.there, room, MemoryKind::kHostArena);
        mine.fill(random);
        std::vector<std::byte> sent = mine.bytes();
        for (size_t size : {0ul, 1ul, 2ul, 7ul, 64ul, 4095ul, 4096ul, 4097ul, 16384ul, 65536ul, 65543ul,
                            kMiB + 1, 2 * kMiB, 9 * kMiB + 5, 64 * kMiB}) {
            CAPTURE(size);
            size_t from = random.below(64), to = random.below(64);
            std::memset(theirs.data(), 0, std::min(room, size + 64));
            Slice there{mine.address() + from, theirs.address() + to, size, Direction::kWrite};
            REQUIRE(*pair.transfer({there}) == size);
            CHECK(std::memcmp(theirs.data() + to, sent.data() + from, size) == 0);
            if (to + size < room) CHECK(theirs.data()[to + size] == std::byte{0});
            std::memset(mine.data(), 0, std::min(room, size + 64));
            there.direction = Direction::kRead;
            REQUIRE(*pair.transfer({there}) == size);
            CHECK(std::memcmp(mine.data() + from, sent.data() + from, size) == 0);
            std::memcpy(mine.data(), sent.data(), std::min(room, size + 64));
        }
    });
}

TEST_CASE("transport: random batches of reads and writes against a model") {
    each_transport([](const std::string& transport) {
        each_kinds(transport, [&](MemoryKind mine_kind, MemoryKind their_kind) {
            Random random(302);
            Pair pair(transport);
            constexpr size_t kSize = 2 * kMiB;
            Memory mine(*pair.here, kSize, mine_kind), theirs(*pair.there, kSize, their_kind);
            mine.fill(random);
            theirs.fill(random);
            std::vector<std::byte> a = mine.bytes(), b = theirs.bytes();
            for (int round = 0; round < (kUnderTsan ? 10 : 40); ++round) {
                // Ranges of one batch that do not meet: its order is nobody's business.
                size_t n = random.between(1, random.one_in(4) ? 3000 : 40);
                size_t width = kSize / n;
                std::vector<Slice> slices;
                uint64_t total = 0;
                for (size_t i = 0; i < n; ++i) {
                    size_t size =
                        random.below(random.one_in(3) ? width + 1 : std::min<size_t>(width, 300) + 1);
                    size_t at = i * width + random.below(width - size + 1);
                    size_t place = (n - 1 - i) * width + random.below(width - size + 1);
                    bool write = random.one_in(2);
                    slices.push_back({mine.address() + at, theirs.address() + place, size,
                                      write ? Direction::kWrite : Direction::kRead});
                    std::memcpy(write ? &b[place] : &a[at], write ? &a[at] : &b[place], size);
                    total += size;
                }
                if (random.one_in(2)) {
                    REQUIRE(*pair.transfer(slices) == total);
                } else {
                    uint64_t ticket = *pair.here->submit(pair.request(slices));
                    REQUIRE(*pair.here->wait(ticket, 10000));
                    TicketStatus status = *pair.here->status(ticket);
                    REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
                    CHECK(status.bytes_done == total);
                    CHECK(std::ranges::count(status.slices, SliceState::kDone) == static_cast<long>(n));
                    REQUIRE(pair.here->release(ticket).ok());
                }
                REQUIRE(mine.bytes() == a);
                REQUIRE(theirs.bytes() == b);
            }
        });
    });
}

TEST_CASE("transport: the target refuses what lies outside of its regions, slice by slice") {
    each_transport([](const std::string& transport) {
        each_kinds(transport, [&](MemoryKind mine_kind, MemoryKind their_kind) {
            Random random(303);
            Pair pair(transport);
            Memory mine(*pair.here, kMiB, mine_kind), theirs(*pair.there, kMiB, their_kind);
            mine.fill(random);
            uint64_t a = mine.address(), b = theirs.address();
            std::vector<std::byte> before = theirs.bytes();
            const std::vector<Slice> bad = {
                {a, b - 1, 16, Direction::kWrite},        {a, b + kMiB - 15, 16, Direction::kWrite},
                {a, b + kMiB, 1, Direction::kRead},       {a, 0, 1, Direction::kRead},
                {a, UINT64_MAX - 3, 8, Direction::kRead}, {a, b - 4096, kMiB, Direction::kRead},
            };
            for (const Slice& slice : bad) {
                Result<uint64_t> moved = pair.transfer({slice});
                REQUIRE_FALSE(moved.ok());
                CHECK(moved.error().code == Code::kInvalidArgument);
                CHECK(moved.error().text.find("no registered region") != std::string::npos);
                CHECK(moved.error().text.find("\"there\"") != std::string::npos);
            }
            CHECK(theirs.bytes() == before);
            // The good ones of a batch are done, before and behind the bad ones, also over several frames.
            std::vector<Slice> mixed;
            for (size_t i = 0; i < 1000; ++i) {
                bool wrong = i % 7 == 3;
                mixed.push_back({a + i * 1000, (wrong ? b + 2 * kMiB : b) + i * 1000, 1000,
                                 i % 2 == 0 ? Direction::kWrite : Direction::kRead});
            }
            uint64_t ticket = *pair.here->submit(pair.request(mixed));
            REQUIRE(*pair.here->wait(ticket, 10000));
            TicketStatus status = *pair.here->status(ticket);
            CHECK(status.state == TicketState::kFailed);
            uint64_t done = 0;
            for (size_t i = 0; i < mixed.size(); ++i) {
                REQUIRE(status.slices[i] == (i % 7 == 3 ? SliceState::kFailed : SliceState::kDone));
                if (i % 7 == 3) continue;
                done += 1000;
                REQUIRE(std::memcmp(mine.data() + i * 1000, theirs.data() + i * 1000, 1000) == 0);
            }
            CHECK(status.bytes_done == done);
            CHECK(pair.here->release(ticket).ok());
            // And the connection is as good as before.
            CHECK(*pair.transfer({{a, b, kMiB, Direction::kWrite}}) == kMiB);
        });
    });
}

TEST_CASE("transport: a local range must be registered") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory theirs(*pair.there, 4096, MemoryKind::kHostArena);
        std::vector<std::byte> loose(4096);
        auto address = reinterpret_cast<uint64_t>(loose.data());
        Result<uint64_t> moved = pair.transfer({{address, theirs.address(), 4096, Direction::kRead}});
        REQUIRE_FALSE(moved.ok());
        CHECK(moved.error().code == Code::kInvalidArgument);
        CHECK(moved.error().text.find("register it first") != std::string::npos);
    });
}

TEST_CASE("transport: memory that the CPU may not touch is refused, and no peer can end the process by it") {
    each_host_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory mine(*pair.here, 2 * kMiB, MemoryKind::kHostArena);
        constexpr size_t kPage = 4096;
        struct Bad {
            const char* why;
            int protection;
            size_t from, size;
        };
        // Of 2 MiB: all of it, a guard page in the middle, the last page.
        const Bad bads[] = {{"without access", PROT_NONE, 0, 2 * kMiB},
                            {"without access", PROT_NONE, kMiB, kPage},
                            {"read-only", PROT_READ, 2 * kMiB - kPage, kPage}};
        auto refused = [&](Engine& owner, uint64_t address, uint64_t length, uint64_t bad, const char* why) {
            Status status = owner.register_region(address, length, "cpu:0");
            REQUIRE_FALSE(status.ok());
            CHECK(status.error().code == Code::kInvalidArgument);
            CHECK(status.error().text.find(why) != std::string::npos);
            CHECK(status.error().text.find("memory of a CUDA card") != std::string::npos);
            char at[32];
            std::snprintf(at, sizeof(at), "0x%llx", static_cast<unsigned long long>(bad));
            CHECK(status.error().text.find(at) != std::string::npos);
            for (Direction direction : {Direction::kRead, Direction::kWrite}) {
                Slice there{mine.address(), address, length, direction};
                CHECK(pair.transfer({there}).error().code == Code::kInvalidArgument);
            }
        };
        for (Engine* owner : {pair.there.get(), pair.here.get()}) {
            for (const Bad& bad : bads) {
                CAPTURE(bad.why);
                auto* pages = static_cast<char*>(
                    ::mmap(nullptr, 2 * kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
                auto address = reinterpret_cast<uint64_t>(pages);
                REQUIRE(::mprotect(pages + bad.from, bad.size, bad.protection) == 0);
                refused(*owner, address, 2 * kMiB, address + bad.from, bad.why);
                ::munmap(pages, 2 * kMiB);
            }
            refused(*owner, kPage, kPage, kPage, "nothing is mapped");  // where no process maps anything
        }
        CHECK(metric(*pair.there, "regions") == 0);
    });
}

TEST_CASE("transport: pages that their owner took away without a word cost the slices that need them") {
    each_host_transport([](const std::string& transport) {
        if (transport == "loopback") return;  // in one process a copy touches them
        if (transport == kOutside) return;    // so does a copy of the example's server
        // A NIC keeps the pages that it has pinned, and a provider in software dies of them.
        if (transport == "rdma" || transport == "efa") return;
        Pair pair(transport);
        constexpr size_t kSize = 4 * kMiB;
        Memory mine(*pair.here, kSize, MemoryKind::kHostArena), theirs(*pair.there, kSize, MemoryKind::kHost);
        auto* pages = static_cast<char*>(
            ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        auto address = reinterpret_cast<uint64_t>(pages);
        REQUIRE(pair.there->register_region(address, kSize, "").ok());
        REQUIRE(::mprotect(pages + 3 * kMiB, kMiB, PROT_NONE) ==
                0);  // unmapped, another thread could map there
        std::memset(mine.data(), 0x33, kSize);
        std::vector<Slice> slices;
        for (size_t i = 0; i < 4; ++i) {
            slices.push_back(
                {mine.address() + i * kMiB, theirs.address() + i * kMiB, kMiB, Direction::kWrite});
            slices.push_back({mine.address() + i * kMiB, address + i * kMiB, kMiB, Direction::kWrite});
        }
        TicketStatus status;
        Result<uint64_t> moved = pair.here->transfer(pair.request(slices), &status);
        REQUIRE_FALSE(moved.ok());
        CHECK(moved.error().text.find("is registered but not mapped") != std::string::npos);
        CHECK(std::ranges::count(status.slices, SliceState::kDone) == 7);
        CHECK(status.slices[7] == SliceState::kFailed);
        CHECK(theirs.bytes() == mine.bytes());
        CHECK(std::memcmp(pages, mine.data(), 3 * kMiB) == 0);
        REQUIRE(pair.there->deregister_region(address).ok());
        ::munmap(pages, kSize);
    });
}

TEST_CASE("transport: ranges with gaps of every size between them, as of heads within tokens") {
    each_transport([](const std::string& transport) {
        each_kinds(transport, [&](MemoryKind mine_kind, MemoryKind their_kind) {
            Random random(306);
            Pair pair(transport);
            constexpr size_t kSize = 2 * kMiB, kCount = 90;
            Memory mine(*pair.here, kSize, mine_kind), theirs(*pair.there, kSize, their_kind);
            mine.fill(random);
            theirs.fill(random);
            std::vector<std::byte> a = mine.bytes(), b = theirs.bytes();
            for (auto [size, gap] : {std::pair{512ul, 0ul},
                                     {1ul, 1ul},
                                     {2048ul, 6144ul},
                                     {4096ul, 8192ul},
                                     {4096ul, 8193ul},
                                     {1000ul, 3000ul}}) {
                CAPTURE(size);
                CAPTURE(gap);
                for (auto [mine_gap, their_gap] : {std::pair{0ul, gap}, {gap, 0ul}, {gap, gap}}) {
                    for (Direction direction : {Direction::kRead, Direction::kWrite}) {
                        std::vector<Slice> slices;
                        for (size_t i = 0; i < kCount; ++i) {
                            const size_t at = i * (size + mine_gap), place = i * (size + their_gap);
                            slices.push_back(
                                {mine.address() + at, theirs.address() + place, size, direction});
                            const bool write = direction == Direction::kWrite;
                            std::memcpy(write ? &b[place] : &a[at], write ? &a[at] : &b[place], size);
                        }
                        REQUIRE(*pair.transfer(slices) == kCount * size);
                        REQUIRE(mine.bytes() == a);
                        REQUIRE(theirs.bytes() == b);
                    }
                }
            }
        });
    });
}

TEST_CASE("transport: pages between the ranges of a batch that no one may read cost no slice") {
    each_host_transport([](const std::string& transport) {
        if (transport == "rdma" || transport == "efa") return;  // a NIC has pinned them
        Random random(307);
        Pair pair(transport);
        constexpr size_t kSize = 64 * 4096;
        Memory mine(*pair.here, kSize, MemoryKind::kHost);
        auto* pages = static_cast<std::byte*>(
            ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        random.fill(pages, kSize);
        auto address = reinterpret_cast<uint64_t>(pages);
        REQUIRE(pair.there->register_region(address, kSize, "").ok());
        std::vector<Slice> slices;
        std::vector<std::byte> truth = mine.bytes();
        for (size_t i = 0; i < 64; i += 2) {
            slices.push_back({mine.address() + i * 2048, address + i * 4096, 4096, Direction::kRead});
            std::memcpy(&truth[i * 2048], pages + i * 4096, 4096);
        }
        for (size_t i = 1; i < 64; i += 6) REQUIRE(::mprotect(pages + i * 4096, 4096, PROT_NONE) == 0);
        REQUIRE(*pair.transfer(slices) == slices.size() * 4096);
        CHECK(mine.bytes() == truth);
        REQUIRE(pair.there->deregister_region(address).ok());
        ::munmap(pages, kSize);
    });
}

TEST_CASE("transport: regions registered later are found, deregistered ones are gone at once") {
    each_transport([](const std::string& transport) {
        each_kinds(transport, [&](MemoryKind mine_kind, MemoryKind their_kind) {
            Random random(304);
            Pair pair(transport);
            Memory mine(*pair.here, 4096, mine_kind);
            mine.fill(random);
            uint64_t gone = 0;
            for (int round = 0; round < 5; ++round) {
                Memory theirs(*pair.there, 4096, their_kind);
                gone = theirs.address();
                REQUIRE(*pair.transfer({{mine.address(), gone, 4096, Direction::kWrite}}) == 4096);
                REQUIRE(theirs.bytes() == mine.bytes());
                REQUIRE(pair.there->deregister_region(gone).ok());
                Result<uint64_t> moved = pair.transfer({{mine.address(), gone, 4096, Direction::kRead}});
                REQUIRE_FALSE(moved.ok());
                CHECK(moved.error().code == Code::kInvalidArgument);
                REQUIRE_FALSE(pair.there->deregister_region(gone).ok());
                if (their_kind != MemoryKind::kHostArena) {
                    REQUIRE(pair.there->register_region(gone, 4096, "").ok());  // for ~Memory
                }
            }
        });
    });
}

TEST_CASE("transport: memory is free once deregister has returned, whoever is at work on it") {
    each_host_transport([](const std::string& transport) {
        for (bool local : {false, true}) {
            CAPTURE(local);
            Pair pair(transport);
            constexpr size_t kSize = 4 * kMiB;
            Memory stays(local ? *pair.there : *pair.here, kSize, MemoryKind::kHost);
            Engine& owner = local ? *pair.here : *pair.there;
            for (int round = 0; round < 6; ++round) {
                void* pages =
                    ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                auto goes = reinterpret_cast<uint64_t>(pages);
                REQUIRE(owner.register_region(goes, kSize, "").ok());
                std::atomic<int> moved{0};
                std::atomic<bool> over{false};
                std::vector<std::thread> threads;
                for (int t = 0; t < 3; ++t) {
                    threads.emplace_back([&, t] {
                        while (!over) {
                            uint64_t at = static_cast<uint64_t>(t) * kMiB;
                            uint64_t a = (local ? goes : stays.address()) + at;
                            uint64_t b = (local ? stays.address() : goes) + at;
                            Direction d = t % 2 == 0 ? Direction::kRead : Direction::kWrite;
                            Result<uint64_t> result = pair.transfer({{a, b, kMiB, d}});
                            if (result.ok()) {
                                ++moved;
                            } else {
                                CHECK(result.error().code == Code::kInvalidArgument);
                                return;
                            }
                        }
                    });
                }
                while (moved < 3) std::this_thread::yield();
                REQUIRE(owner.deregister_region(goes).ok());
                ::munmap(pages, kSize);  // whoever still touches it dies
                over = true;
                for (std::thread& thread : threads) thread.join();
            }
        }
    });
}

TEST_CASE("transport: a notification comes after the data of its batch, and once") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        constexpr size_t kSize = 6 * kMiB;
        Memory mine(*pair.here, kSize, MemoryKind::kHostArena),
            theirs(*pair.there, kSize, MemoryKind::kHostArena);
        for (int round = 1; round <= 10; ++round) {
            std::memset(mine.data(), round, kSize);
            TransferRequest request = pair.request({});
            std::vector<Slice> slices;
            for (size_t i = 0; i < 6; ++i) {
                slices.push_back(
                    {mine.address() + i * kMiB, theirs.address() + i * kMiB, kMiB, Direction::kWrite});
            }
            request.slices = slices;
            std::string message = "round " + std::to_string(round);
            request.notify = message;
            uint64_t ticket = 0;
            if (round % 2 == 0) {
                REQUIRE(pair.here->transfer(request).ok());
            } else {
                ticket = *pair.here->submit(request);
            }
            std::vector<std::pair<std::string, std::string>> got;
            while (got.empty()) {
                REQUIRE(readable(pair.there->event_fd(), 10000));
                (void)pair.there->poll();
                got = *pair.there->notifications();
            }
            REQUIRE(got.size() == 1);
            CHECK(got[0].first == "here");
            CHECK(got[0].second == message);
            for (size_t at : {size_t{0}, kSize / 2, kSize - 1}) CHECK(theirs.data()[at] == std::byte(round));
            if (ticket != 0) REQUIRE(*pair.here->wait(ticket, 10000));
            if (ticket != 0) REQUIRE(pair.here->release(ticket).ok());
        }
        CHECK(pair.there->notifications()->empty());
    });
}

TEST_CASE("transport: a failed batch brings no notification") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory mine(*pair.here, 4096, MemoryKind::kHostArena),
            theirs(*pair.there, 4096, MemoryKind::kHostArena);
        std::vector<Slice> slices = {{mine.address(), theirs.address(), 4096, Direction::kWrite},
                                     {mine.address(), theirs.address() + 8192, 1, Direction::kWrite}};
        TransferRequest request = pair.request(slices);
        request.notify = "never";
        REQUIRE_FALSE(pair.here->transfer(request).ok());
        REQUIRE(pair.here->notify(pair.segment, "after it").ok());
        auto got = *pair.there->notifications();
        REQUIRE(got.size() == 1);
        CHECK(got[0].second == "after it");
    });
}

TEST_CASE("transport: tickets end once, tell by the descriptor, and can be cancelled at any time") {
    each_transport([](const std::string& transport) {
        Random random(305);
        Pair pair(transport);
        constexpr size_t kSize = 40 * kMiB;
        Memory mine(*pair.here, kSize, MemoryKind::kHostArena),
            theirs(*pair.there, kSize, MemoryKind::kHostArena);
        std::vector<uint64_t> open;
        size_t ended = 0, cancelled = 0;
        for (int i = 0; i < 40; ++i) {
            size_t size = random.one_in(3) ? kMiB : random.between(1, 100000);
            uint64_t at = static_cast<uint64_t>(i) * kMiB;
            std::vector<Slice> slices = {
                {mine.address() + at, theirs.address() + at, size, Direction::kRead}};
            TransferRequest request = pair.request(slices);
            request.background = random.one_in(2);
            open.push_back(*pair.here->submit(request));
            if (random.one_in(3)) {
                ++cancelled;
                REQUIRE(pair.here->cancel(open[random.below(open.size())]).ok());
            }
        }
        std::vector<uint64_t> seen;
        while (ended < open.size()) {
            REQUIRE(readable(pair.here->event_fd(), 10000));
            std::vector<uint64_t> now = *pair.here->poll();
            ended += now.size();
            seen.insert(seen.end(), now.begin(), now.end());
        }
        std::ranges::sort(seen);
        CHECK(seen == open);
        for (uint64_t ticket : open) {
            TicketStatus status = *pair.here->status(ticket);
            bool done = status.state == TicketState::kDone;
            CHECK((done || (cancelled != 0 && status.state == TicketState::kCancelled)));
            CHECK(status.slices[0] == (done ? SliceState::kDone : SliceState::kCancelled));
            REQUIRE(pair.here->release(ticket).ok());
            CHECK_FALSE(pair.here->status(ticket).ok());
        }
        CHECK(pair.here->poll()->empty());
        CHECK(metric(*pair.here, "tickets") == 0);
        CHECK(metric(*pair.here, "slices_open") == 0);
    });
}

TEST_CASE("transport: many threads at once, each with its own ranges") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        constexpr size_t kThreads = 6, kRoom = 256 * 1024;
        Memory mine(*pair.here, kThreads * kRoom, MemoryKind::kHost);
        Memory theirs(*pair.there, kThreads * kRoom, MemoryKind::kHostArena);
        std::vector<std::thread> threads;
        std::atomic<int> wrong{0};
        for (size_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                Random random(306 + t);
                std::byte* local = mine.data() + t * kRoom;
                uint64_t remote = theirs.address() + t * kRoom;
                for (int round = 0; round < 60; ++round) {
                    size_t size = random.between(1, kRoom / 2);
                    std::memset(local, static_cast<int>(round + t), size);
                    auto a = reinterpret_cast<uint64_t>(local);
                    if (!pair.transfer({{a, remote, size, Direction::kWrite}}).ok()) ++wrong;
                    if (!pair.transfer({{a + kRoom / 2, remote, size, Direction::kRead}}).ok()) ++wrong;
                    if (std::memcmp(local, local + kRoom / 2, size) != 0) ++wrong;
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        CHECK(wrong == 0);
        CHECK(metric(*pair.here, "dials_total") <= 2);
    });
}

TEST_CASE("transport: a peer that closes in the middle ends the transfer, not the caller") {
    each_host_transport([](const std::string& transport) {
        Pair pair(transport);
        constexpr size_t kSize = 8 * kMiB;
        Memory mine(*pair.here, kSize, MemoryKind::kHostArena);
        auto theirs = *pair.there->allocate(kSize, "");
        auto remote = reinterpret_cast<uint64_t>(theirs->data());
        std::atomic<int> rounds{0};
        Error error;
        std::thread mover([&] {
            for (;;) {
                Result<uint64_t> moved =
                    pair.transfer({{mine.address(), remote, kSize / 2, Direction::kWrite}});
                if (!moved.ok()) {
                    error = moved.error();
                    return;
                }
                ++rounds;
            }
        });
        while (rounds < 2) std::this_thread::yield();
        std::vector<Slice> reading = {
            {mine.address() + kSize / 2, remote + kSize / 2, kSize / 2, Direction::kRead}};
        uint64_t ticket = *pair.here->submit(pair.request(reading));
        (void)pair.there->close();
        mover.join();
        CHECK((error.code == Code::kUnavailable || error.code == Code::kInvalidArgument));
        CHECK(error.text.find("\"there\" at 127.0.0.1:") != std::string::npos);
        CHECK(error.text.find(" of 4194304 bytes") != std::string::npos);
        REQUIRE(*pair.here->wait(ticket, 10000));
        Result<uint64_t> moved = pair.transfer({{mine.address(), remote, 1, Direction::kWrite}});
        REQUIRE_FALSE(moved.ok());
    });
}

TEST_CASE("transport: close ends what runs, and every later call says so") {
    each_transport([](const std::string& transport) {
        Pair pair(transport);
        constexpr size_t kSize = 8 * kMiB;
        Memory theirs(*pair.there, kSize, MemoryKind::kHostArena);
        auto mine = *pair.here->allocate(kSize, "");
        auto local = reinterpret_cast<uint64_t>(mine->data());
        std::vector<std::thread> threads;
        std::atomic<int> rounds{0};
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&, t] {
                for (;;) {
                    uint64_t at = static_cast<uint64_t>(t) * 2 * kMiB;
                    std::vector<Slice> slices = {
                        {local + at, theirs.address() + at, 2 * kMiB, Direction::kRead}};
                    Result<uint64_t> moved =
                        t == 0 ? pair.here->submit(pair.request(slices)) : pair.transfer(slices);
                    if (!moved.ok()) {
                        CHECK((moved.error().code == Code::kClosed ||
                               moved.error().code == Code::kInvalidArgument ||
                               moved.error().code == Code::kTooLarge));
                        return;
                    }
                    if (t == 0) (void)pair.here->wait(*moved, 10000);
                    ++rounds;
                }
            });
        }
        while (rounds < 6) std::this_thread::yield();
        (void)pair.here->close();
        (void)pair.here->close();
        for (std::thread& thread : threads) thread.join();
        CHECK(pair.here->open("127.0.0.1:1").error().code == Code::kClosed);
        CHECK(pair.here->poll().error().code == Code::kClosed);
        CHECK(pair.here->allocate(4096, "").error().code == Code::kClosed);
    });
}
