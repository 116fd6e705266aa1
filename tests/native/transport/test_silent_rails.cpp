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

    Cabled() {
        EngineOptions options = engine_options("here", "rdma");
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
        for (const char* fault : {"late=1", "lost=1"}) {
            CAPTURE(fault);
            VerbsBed bed("devices=1");
            Cabled nodes;
            std::memset(nodes.mine->data(), 0x55, kMiB);
            REQUIRE(nodes.write(8, kEngineTimeoutMs));
            soft_verbs().soft_verbs_script((std::string("devices=1 ") + fault).c_str());
            nodes.cable.cut_all();
            auto began = std::chrono::steady_clock::now();
            REQUIRE_FALSE(nodes.write(1000, kTransferTimeoutMs, waits));
            CHECK(std::chrono::steady_clock::now() - began < kLongest);
            CHECK(nodes.status.failure.error.code == Code::kTimeout);
            CHECK_FALSE(nodes.status.failure.settled);
            CHECK(VerbsBed::count("in_wire") == (std::string(fault) == "late=1" ? 1 : 0));
            // Nor does the link carry anything, before the peer has ended the connection.
            REQUIRE_FALSE(nodes.write(1000, kTransferTimeoutMs, waits));
            CHECK(nodes.status.failure.settled == false);
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
