// RDMA when nothing is heard any more: of one NIC, of the last of them, or of the peer's process, too.
#include <chrono>

#include "bed.hpp"
#include "nodes.hpp"
#include "relay.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr int kEngineTimeoutMs = 40'000, kTransferTimeoutMs = 500;
// A transfer that waits for an answer of the peer ends with the engine's timeout.
constexpr std::chrono::seconds kLongest{20};

// A writer whose questions to the peer go through a cable, and whose writes do not.
struct Cabled {
    std::shared_ptr<Engine> here, there = make_engine(engine_options("there", ""));
    Relay cable{there->addresses().front()};
    uint32_t segment = 0;
    std::optional<Memory> mine, theirs;
    TicketStatus status;

    explicit Cabled(std::vector<std::string> transports = {"rdma"}) {
        EngineOptions options = engine_options("here", "");
        options.transports = std::move(transports);
        options.timeout_ms = kEngineTimeoutMs;
        options.rdma.silence_ms = 200;
        here = make_engine(options);
        mine.emplace(*here, kMiB, MemoryKind::kHost);
        theirs.emplace(*there, kMiB, MemoryKind::kHostArena);
        segment = *here->open(cable.address());
    }
    TransferRequest request(const std::vector<Slice>& slices, int timeout_ms) const {
        TransferRequest made;
        made.segments = {&segment, 1};
        made.slices = slices;
        made.timeout_ms = timeout_ms;
        return made;
    }
    // Waits in the call, or has a ticket; `status` says what became of it.
    bool write(uint64_t bytes, int timeout_ms, bool waits = true) {
        std::vector<Slice> slices = {{mine->address(), theirs->address(), bytes, Direction::kWrite}};
        status = {};
        if (waits) return here->transfer(request(slices, timeout_ms), &status).ok();
        uint64_t ticket = *here->submit(request(slices, timeout_ms));
        REQUIRE(*here->wait(ticket, 10 * kEngineTimeoutMs));
        status = *here->status(ticket);
        return status.state == TicketState::kDone;
    }
};

}  // namespace

TEST_CASE("rdma: a transfer ends at its deadline where the peer answers nothing, and is not settled") {
    for (bool waits : {true, false}) {
        CAPTURE(waits);
        for (const char* fault : {"late=1", "lost=1", "late=1 and TCP"}) {
            CAPTURE(fault);
            VerbsBed bed("devices=1");
            const bool late = std::string(fault) != "lost=1";
            Cabled nodes(std::string(fault).ends_with("TCP") ? std::vector<std::string>{"rdma", "tcp"}
                                                             : std::vector<std::string>{"rdma"});
            std::memset(nodes.mine->data(), 0x55, kMiB);
            while (VerbsBed::count("posts") == 0) REQUIRE(nodes.write(8, kEngineTimeoutMs));
            soft_verbs().soft_verbs_script((std::string("devices=1 ") + fault).c_str());
            nodes.cable.cut_all();
            auto began = std::chrono::steady_clock::now();
            REQUIRE_FALSE(nodes.write(1000, kTransferTimeoutMs, waits));
            CHECK(std::chrono::steady_clock::now() - began < kLongest);
            CHECK(nodes.status.failure.error.code == Code::kTimeout);
            CHECK_FALSE(nodes.status.failure.settled);
            CHECK(VerbsBed::count("in_wire") == (late ? 1 : 0));
            // Nor does the link carry anything, before the peer has ended the connection.
            REQUIRE_FALSE(nodes.write(1000, kTransferTimeoutMs, waits));
            CHECK_FALSE(nodes.status.failure.settled);
            nodes.cable.join();
            std::memset(nodes.mine->data(), 0x77, kMiB);
            REQUIRE(nodes.write(1000, kEngineTimeoutMs, waits));
            CHECK(soft_verbs().soft_verbs_release() == 0);
            CHECK(all_are(std::byte{0x77}, nodes.theirs->data(), 1000));
        }
    }
}

TEST_CASE("rdma: a submitted transfer ends at its deadline before any rail was connected") {
    VerbsBed bed("devices=1");
    Cabled nodes;
    nodes.cable.cut_all();
    auto began = std::chrono::steady_clock::now();
    REQUIRE_FALSE(nodes.write(1000, kTransferTimeoutMs, false));
    CHECK(std::chrono::steady_clock::now() - began < kLongest);
    CHECK(nodes.status.failure.error.code == Code::kTimeout);
    CHECK(nodes.status.failure.settled);  // nothing of it was sent
    nodes.cable.join();
    CHECK(nodes.write(1000, kEngineTimeoutMs));
}

// Beside a fast rail that carries the rest; beside one that is idle meanwhile; and as the last one, before
// TCP.
TEST_CASE("rdma: a slow rail that was measured and falls silent is left after what it should have taken") {
    constexpr uint64_t kBytesPerUs = 4;
    constexpr uint64_t kPieceNs = (64u << 10) * 1000 / kBytesPerUs;
    struct Bed {
        const char* script;
        std::vector<std::string> transports;
        size_t bytes;
        uint64_t rest_ns;  // that the other rail takes
    };
    for (const Bed& how :
         std::vector<Bed>{{"devices=2 virtual speed0=4 speed1=16", {"rdma"}, 8 * kMiB, 8 * kMiB * 1000 / 16},
                          {"devices=2 virtual speed0=4 speed1=16", {"rdma"}, kMiB, kMiB * 1000 / 16},
                          {"devices=1 virtual speed0=4", {"rdma", "tcp"}, kMiB, 0}}) {
        CAPTURE(how.script);
        CAPTURE(how.bytes);
        for (Direction direction : {Direction::kWrite, Direction::kRead}) {
            VerbsBed bed(how.script);
            Nodes nodes(how.transports, 8 * kMiB, [](EngineOptions& options) {
                options.rdma.clock_ns = soft_verbs().soft_verbs_now;
                options.rdma.silence_ms = 30;
            });
            nodes.warm_up("rdma");
            std::vector<Slice> slices = {
                {nodes.mine.address(), nodes.theirs.address(), how.bytes, direction}};
            for (int i = 0; i < 3; ++i) REQUIRE(nodes.pair.transfer(slices).ok());  // measures them
            Random random(913);
            nodes.mine.fill(random);
            nodes.theirs.fill(random);
            uint64_t carried = VerbsBed::count("bytes0");
            soft_verbs().soft_verbs_silent(0, 1);
            uint64_t before = soft_verbs().soft_verbs_now();
            Result<uint64_t> moved = nodes.pair.transfer(slices);
            REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            uint64_t taken_ns = soft_verbs().soft_verbs_now() - before;
            CHECK(VerbsBed::count("bytes0") > carried);
            CHECK(std::memcmp(nodes.mine.data(), nodes.theirs.data(), how.bytes) == 0);
            MESSAGE((how.bytes / kMiB)
                    << " MiB, the slow rail silent: " << static_cast<double>(taken_ns) / 1e6 << " ms");
            // Eight times what a piece takes, as the link has it.
            CHECK(taken_ns < how.rest_ns + 8 * kPieceNs + 50'000'000);
        }
    }
}
