// Hand-overs between unlike layouts: thousands of small pieces of cards, which the card's kernel moves, on
// each path; with cards that hang, die and refuse amid them.
#include <thread>

#include "../process.hpp"
#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

const char* const kSmallPaths[] = {"loopback", "tcp", "cuda_ipc"};

// One KV cache in two layouts: here rows of `columns` pieces, there columns of `rows` pieces.
struct Layouts {
    uint64_t rows = 8, columns = 12, piece = 512;

    uint64_t bytes() const { return rows * columns * piece; }
    std::vector<Slice> slices(uint64_t mine, uint64_t theirs, Direction direction) const {
        std::vector<Slice> slices;
        for (uint64_t r = 0; r < rows; ++r) {
            for (uint64_t c = 0; c < columns; ++c) {
                slices.push_back(
                    {mine + (r * columns + c) * piece, theirs + (c * rows + r) * piece, piece, direction});
            }
        }
        return slices;
    }
    // The bytes of the one as the other has them.
    std::vector<std::byte> there(const std::vector<std::byte>& here) const {
        std::vector<std::byte> there(bytes());
        for (const Slice& slice : slices(0, 0, Direction::kWrite)) {
            std::memcpy(there.data() + slice.remote, here.data() + slice.local, piece);
        }
        return there;
    }
};

EngineOptions limited(const std::string& name, const std::string& transport, int timeout_ms) {
    EngineOptions options = engine_options(name, transport);
    options.timeout_ms = timeout_ms;
    return options;
}

int kernels() { return soft_device().soft_calls("cuLaunchKernel"); }

}  // namespace

TEST_CASE("small pieces: unlike layouts are moved by the kernel, on every path and between every two kinds") {
    Random random(2420);
    struct Sides {
        MemoryKind mine, theirs;
    };
    using enum MemoryKind;
    for (const char* path : kSmallPaths) {
        for (Sides sides : {Sides{kDevice, kDevice}, Sides{kDevice, kHost}, Sides{kHost, kDevice}}) {
            const bool one_host = std::strcmp(path, "tcp") != 0;
            if (one_host && sides.theirs == kHost) continue;  // no run on the host's side
            for (Policy policy : {Policy::kLate, Policy::kEarly, Policy::kAtOnce, Policy::kShuffled}) {
                CAPTURE(path);
                CAPTURE(kind_name(sides.mine));
                CAPTURE(kind_name(sides.theirs));
                CAPTURE(name_of(policy));
                Bed bed(policy, random.next());
                {
                    Pair pair(path);
                    Layouts layouts{.piece = random.one_in(3) ? random.between(1, 99) : 512};
                    Memory mine(*pair.here, layouts.bytes(), sides.mine);
                    Memory theirs(*pair.there, layouts.bytes(), sides.theirs);
                    mine.fill(random);
                    std::vector<std::byte> before = mine.bytes();
                    int launched = kernels();
                    REQUIRE(*pair.transfer(layouts.slices(mine.address(), theirs.address(),
                                                          Direction::kWrite)) == layouts.bytes());
                    CHECK(kernels() > launched);
                    launched = kernels();
                    CHECK(theirs.bytes() == layouts.there(before));
                    std::memset(mine.data(), 0, layouts.bytes());
                    REQUIRE(*pair.transfer(layouts.slices(mine.address(), theirs.address(),
                                                          Direction::kRead)) == layouts.bytes());
                    CHECK(kernels() > launched);
                    CHECK(mine.bytes() == before);
                }
                bed.end();
            }
        }
    }
}

TEST_CASE("small pieces: another process's memory, opened by its handle, is moved by the kernel") {
    Child owner("cuda ipc owner");
    owner.say("0");
    std::string address = owner.hear();
    uint64_t theirs = std::stoull(owner.hear());
    (void)owner.hear();
    Random random(2421);
    Bed bed(Policy::kShuffled, random.next());
    {
        std::shared_ptr<Engine> engine = make_engine(engine_options("here", "cuda_ipc"));
        uint32_t segment = *engine->open(address);
        Layouts layouts;
        Memory mine(*engine, layouts.bytes(), MemoryKind::kDevice);
        mine.fill(random);
        std::vector<std::byte> before = mine.bytes();
        TransferRequest request;
        request.segments = {&segment, 1};
        for (Direction direction : {Direction::kWrite, Direction::kRead}) {
            std::vector<Slice> slices = layouts.slices(mine.address(), theirs, direction);
            request.slices = slices;
            int launched = kernels();
            REQUIRE(*engine->transfer(request) == layouts.bytes());
            CHECK(kernels() == launched + 1);
            if (direction == Direction::kWrite) std::memset(mine.data(), 0, layouts.bytes());
        }
        CHECK(mine.bytes() == before);
        // As it lies there.
        std::vector<Slice> plain = {{mine.address(), theirs, layouts.bytes(), Direction::kRead}};
        request.slices = plain;
        REQUIRE(*engine->transfer(request) == layouts.bytes());
        CHECK(mine.bytes() == layouts.there(before));
    }
    bed.end();
    owner.say("end");
    CHECK(owner.hear() == "ended");
}

TEST_CASE(
    "small pieces: a card that hangs amid them costs its transfer its time, and keeps what it touches") {
    Random random(2422);
    for (const char* path : kSmallPaths) {
        // Which operation: the copies before the kernel, the kernel, what is behind it.
        for (int operation : {1, 2, 3}) {
            CAPTURE(path);
            CAPTURE(operation);
            Bed bed;
            {
                Pair pair(limited("here", path, 300), limited("there", "", 300));
                Layouts layouts{.rows = 8, .columns = 8};
                Memory mine(*pair.here, layouts.bytes(), MemoryKind::kHost);
                Memory other(*pair.here, layouts.bytes(), MemoryKind::kDevice);
                Memory theirs(*pair.there, layouts.bytes(), MemoryKind::kDevice);
                const bool one_host = std::strcmp(path, "tcp") != 0;
                Memory& local = one_host ? other : mine;
                local.fill(random);
                std::vector<std::byte> sent = local.bytes();
                soft_device().soft_hang(operation);
                Result<uint64_t> moved =
                    pair.transfer(layouts.slices(local.address(), theirs.address(), Direction::kWrite));
                REQUIRE_FALSE(moved.ok());
                CHECK_MESSAGE(moved.error().code == Code::kTimeout, moved.error().text);
                CHECK(kernels() == 1);
                Status gone = pair.there->deregister_region(theirs.address());
                REQUIRE_FALSE(gone.ok());
                CHECK(gone.error().code == Code::kTimeout);
                soft_device().soft_unhang();
                soft_device().soft_settle();
                CHECK(theirs.bytes() == layouts.there(sent));  // it ran on, with all that it needs
                REQUIRE(pair.there->deregister_region(theirs.address()).ok());
            }
            bed.end();
        }
    }
}

TEST_CASE(
    "small pieces: a later transfer is not overwritten by one that was given up, nor by its staging memory") {
    Random random(2423);
    for (const char* path : kSmallPaths) {
        CAPTURE(path);
        Bed bed;
        {
            // A target is patient for less time than its initiator, which is told.
            const bool one_host = std::strcmp(path, "tcp") != 0;
            Pair pair(limited("here", path, one_host ? 1000 : 20000), limited("there", "", 1000));
            Layouts layouts{.rows = 8, .columns = 10};
            MemoryKind kind = one_host ? MemoryKind::kDevice : MemoryKind::kHost;
            Memory first(*pair.here, layouts.bytes(), kind), second(*pair.here, layouts.bytes(), kind);
            Memory theirs(*pair.there, layouts.bytes(), MemoryKind::kDevice);
            first.fill(random);
            second.fill(random);
            soft_device().soft_hang(2);
            REQUIRE_FALSE(
                pair.transfer(layouts.slices(first.address(), theirs.address(), Direction::kWrite)).ok());
            int launched = kernels();
            std::vector<Slice> slices = layouts.slices(second.address(), theirs.address(), Direction::kWrite);
            uint64_t ticket = *pair.here->submit(pair.request(slices));
            while (kernels() == launched) std::this_thread::yield();
            soft_device().soft_unhang();
            REQUIRE(*pair.here->wait(ticket, 20000));
            TicketStatus status = *pair.here->status(ticket);
            REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
            soft_device().soft_settle();
            CHECK(theirs.bytes() == layouts.there(second.bytes()));
            REQUIRE(pair.here->release(ticket).ok());
        }
        bed.end();
    }
}

TEST_CASE("small pieces: threads of both engines at once, with memory that runs out and cards that die") {
    Random random(2424);
    for (const char* path : kSmallPaths) {
        for (int round = 0; round < 4; ++round) {
            const bool dies = round == 3;
            CAPTURE(path);
            CAPTURE(round);
            Bed bed(Policy::kShuffled, random.next());
            {
                Pair pair(path);
                constexpr size_t kThreads = 3;
                Layouts layouts{
                    .rows = 10, .columns = 10, .piece = random.one_in(2) ? 256 : random.between(1, 99)};
                Memory mine(*pair.here, kThreads * layouts.bytes(), MemoryKind::kDevice);
                Memory theirs(*pair.there, kThreads * layouts.bytes(), MemoryKind::kDevice);
                mine.fill(random);
                std::vector<std::byte> before = mine.bytes();
                // Of the second round's staging memory none is given, of the third's some.
                uint64_t taken = mine.size() + theirs.size() + 256;
                if (round == 1) soft_device().soft_limit(taken + (4u << 20), UINT64_MAX);
                if (round == 2) soft_device().soft_limit(taken + (14u << 20), UINT64_MAX);
                if (dies) {
                    soft_device().soft_die(static_cast<int>(random.between(1, 20)),
                                           device::cu::kIllegalAddress);
                }
                std::vector<std::thread> threads;
                for (size_t t = 0; t < kThreads; ++t) {
                    threads.emplace_back([&, t] {
                        uint64_t at = t * layouts.bytes();
                        for (int turn = 0; turn < 2; ++turn) {
                            for (Direction direction : {Direction::kWrite, Direction::kRead}) {
                                Result<uint64_t> moved = pair.transfer(
                                    layouts.slices(mine.address() + at, theirs.address() + at, direction));
                                if (moved.ok() || dies) continue;
                                CHECK_MESSAGE(moved.ok(), moved.error().text);
                            }
                        }
                    });
                }
                for (std::thread& thread : threads) thread.join();
                if (!dies) CHECK(mine.bytes() == before);
                for (size_t t = 0; t < kThreads && !dies; ++t) {
                    std::vector<std::byte> part(before.data() + t * layouts.bytes(),
                                                before.data() + (t + 1) * layouts.bytes());
                    std::vector<std::byte> there = layouts.there(part);
                    CHECK(std::memcmp(theirs.data() + t * layouts.bytes(), there.data(), there.size()) == 0);
                }
            }
            if (dies) {
                bed.forget();
            } else {
                bed.end();
            }
        }
    }
}
