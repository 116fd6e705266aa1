// RDMA over the software libibverbs: ends of a rail with unequal MTU, completions out of their turn, a device
// that fails as a whole, addresses that lead nowhere, a rail that fails again and again; and how many calls
// and completions a batch costs.
#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "bed.hpp"
#include "nodes.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

void apart(EngineOptions& options) { options.rdma.devices = {options.name == "here" ? "soft0" : "soft1"}; }

std::string why_failed(const Result<uint64_t>& moved) { return moved.ok() ? "" : moved.error().text; }

std::vector<Slice> write_of(Nodes& nodes, uint64_t bytes, uint64_t at = 0) {
    return {{nodes.mine.address() + at, nodes.theirs.address() + at, bytes, Direction::kWrite}};
}

// `n` slices of so many bytes each, one behind the other.
std::vector<Slice> small_ones(Nodes& nodes, size_t n, uint64_t bytes, Direction direction) {
    std::vector<Slice> slices;
    for (size_t i = 0; i < n; ++i) {
        slices.push_back(
            {nodes.mine.address() + i * bytes, nodes.theirs.address() + i * bytes, bytes, direction});
    }
    return slices;
}

}  // namespace

TEST_CASE("rdma: of two ports with unequal MTU packets have the smaller one") {
    for (const char* script : {"devices=2 mtu0=5 mtu1=1", "devices=2 mtu0=1 mtu1=5"}) {
        CAPTURE(script);
        VerbsBed bed(script);
        Nodes nodes({"rdma"}, kMiB, apart);
        nodes.warm_up("rdma");
        const uint64_t made = VerbsBed::count("pairs_made");
        Random random(921);
        nodes.check_transfer(random);
        CHECK(VerbsBed::count("pairs_made") == made);  // no connection failed
    }
}

TEST_CASE("rdma: a completion that comes when its queue pair has a successor counts for nothing") {
    for (bool failed : {false, true}) {
        CAPTURE(failed);
        VerbsBed bed("devices=1");
        Nodes nodes({"rdma"}, kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 200; });
        nodes.warm_up("rdma");
        auto write = [&](int value) {
            std::memset(nodes.mine.data(), value, 1000);
            Result<uint64_t> moved = nodes.pair.transfer(write_of(nodes, 1000));
            REQUIRE_MESSAGE(moved.ok(), why_failed(moved));
            CHECK(all_are(std::byte(value), nodes.theirs.data(), 1000));
        };
        // The queue pair has carried more than its successor will have when the completion comes.
        for (int value = 1; value <= 8; ++value) write(value);
        soft_verbs().soft_verbs_script(failed ? "devices=1 fail=2:12 held=2:5" : "devices=1 held=2:5 lost=5");
        write(0x31);  // a write and a read of one byte, which is never told of; again on the next queue pair
        REQUIRE(VerbsBed::count("told_late") == 0);
        const uint64_t made = VerbsBed::count("pairs_made");
        write(0x32);
        CHECK(VerbsBed::count("told_late") == 1);
        // An old failure is none of the queue pair that there is.
        if (failed) CHECK(VerbsBed::count("pairs_made") == made);
    }
}

TEST_CASE("rdma: completions that come in another order, or twice, count once") {
    constexpr size_t kSlices = 100;                      // of 8 bytes: a batch of 64 and one of 36 ...
    constexpr int kFirstEnd = 64 + 1, kSecondEnd = 102;  // ... each with a read behind it
    for (const std::string& fault :
         {"twice=" + std::to_string(kFirstEnd) + " lost=" + std::to_string(kFirstEnd + 1),
          "twice=" + std::to_string(kSecondEnd) + " lost=" + std::to_string(kSecondEnd + 1),
          "swapped=" + std::to_string(kFirstEnd),
          "swapped=" + std::to_string(kFirstEnd) + " lost=" + std::to_string(kSecondEnd + 1)}) {
        CAPTURE(fault);
        VerbsBed bed("devices=1");
        Nodes nodes({"rdma"}, kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 200; });
        nodes.warm_up("rdma");
        soft_verbs().soft_verbs_script(("devices=1 " + fault).c_str());
        for (int round = 1; round <= 3; ++round) {
            CAPTURE(round);
            Random random(922 + static_cast<uint64_t>(round));
            nodes.mine.fill(random);
            const uint64_t before = metric(*nodes.pair.here, "rdma_write_slices_total");
            Result<uint64_t> moved = nodes.pair.transfer(small_ones(nodes, kSlices, 8, Direction::kWrite));
            REQUIRE_MESSAGE(moved.ok(), why_failed(moved));
            CHECK(std::memcmp(nodes.mine.data(), nodes.theirs.data(), kSlices * 8) == 0);
            CHECK(metric(*nodes.pair.here, "rdma_write_slices_total") - before == kSlices);
        }
        if (fault.starts_with("swapped")) CHECK(VerbsBed::count("told_late") == 1);
    }
}

// The watchdog would take longer than a transfer may: only the event helps.
TEST_CASE("rdma: a device that fails as a whole is left by its event, then TCP carries on") {
    VerbsBed bed("devices=2 speed0=400 speed1=400");
    Nodes nodes({"rdma", "tcp"}, 8 * kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 60'000; });
    nodes.warm_up("rdma");
    Random random(925);
    nodes.check_transfer(random);
    for (int device : {0, 1}) {
        CAPTURE(device);
        const uint64_t carried = VerbsBed::count("requests"), by_tcp = nodes.moved_by("tcp");
        std::atomic<bool> over{false};
        std::thread breaker([&] {
            while (!over && VerbsBed::count("requests") < carried + 8) std::this_thread::yield();
            soft_verbs().soft_verbs_fatal(device);
        });
        nodes.check_transfer(random);
        over = true;
        breaker.join();
        nodes.check_transfer(random);
        CHECK((nodes.moved_by("tcp") > by_tcp) == (device == 1));
    }
}

TEST_CASE("rdma: where the only device has failed the error names its port") {
    VerbsBed bed("devices=1");
    Nodes nodes({"rdma"}, kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 60'000; });
    nodes.warm_up("rdma");
    soft_verbs().soft_verbs_fatal(0);
    Result<uint64_t> moved = nodes.pair.transfer(write_of(nodes, 1000));
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kUnavailable);
    CHECK_MESSAGE(moved.error().text.find("the port soft0:1 is down") != std::string::npos,
                  moved.error().text);
}

TEST_CASE("rdma: where no way leads to an address the error names it, from either side") {
    struct Gone {
        const char* script;
        const char* says;
    };
    for (const Gone& gone :
         {Gone{"devices=2 gone0",
               "no queue pair of the peer: soft1:1 10.8.1.1 does not reach 10.8.0.1: finding the way: "
               "Connection timed out"},
          Gone{"devices=2 gone1",
               "soft0:1 10.8.0.1 does not reach 10.8.1.1: finding the way: Connection timed out"}}) {
        CAPTURE(gone.script);
        VerbsBed bed(gone.script);
        {
            Nodes nodes({"rdma"}, kMiB, apart);
            Result<uint64_t> moved = nodes.pair.transfer(write_of(nodes, 1000));
            REQUIRE_FALSE(moved.ok());
            CHECK(moved.error().code == Code::kUnavailable);
            CHECK_MESSAGE(moved.error().text.find(gone.says) != std::string::npos, moved.error().text);
        }
        Nodes nodes({"rdma", "tcp"}, kMiB, apart);
        Random random(926);
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("rdma") == 0);
    }
}

// By a device that takes 4 s for what is asked of it.
TEST_CASE("rdma: nothing lands in memory of a transfer that has ended, though the NIC was at work for it") {
    VerbsBed bed("devices=1");
    Nodes nodes({"rdma"}, 4 * kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 60'000; });
    nodes.warm_up("rdma");
    soft_verbs().soft_verbs_script("devices=1 speed0=1");
    Engine& here = *nodes.pair.here;
    std::vector<Slice> slices = {
        {nodes.mine.address(), nodes.theirs.address(), nodes.mine.size(), Direction::kRead}};
    uint64_t ticket = *here.submit(nodes.pair.request(slices));
    const uint64_t limit = now_ns() + 60'000'000'000;
    while (VerbsBed::count("under_way") < 2 && now_ns() < limit) std::this_thread::yield();
    REQUIRE(VerbsBed::count("under_way") > 1);
    REQUIRE(here.close_segment(nodes.pair.segment).ok());
    REQUIRE(*here.wait(ticket, 20'000));
    CHECK((*here.status(ticket)).state != TicketState::kDone);
    std::memset(nodes.mine.data(), 0x22, nodes.mine.size());  // its owner has it again
    while (VerbsBed::count("under_way") != 0 && now_ns() < limit) std::this_thread::yield();
    REQUIRE(VerbsBed::count("under_way") == 0);
    CHECK(all_are(std::byte{0x22}, nodes.mine.data(), nodes.mine.size()));
}

TEST_CASE("rdma: a rail that fails again and again is tried after longer and longer pauses") {
    constexpr uint64_t kMs = 1'000'000, kMarginMs = 50;
    VerbsBed bed("devices=1 virtual");
    Nodes nodes({"rdma", "tcp"}, kMiB,
                [](EngineOptions& options) { options.rdma.clock_ns = soft_verbs().soft_verbs_now; });
    nodes.warm_up("rdma");
    auto by_rdma = [&] {
        const uint64_t before = nodes.moved_by("rdma");
        Result<uint64_t> moved = nodes.pair.transfer(write_of(nodes, 1000));
        REQUIRE_MESSAGE(moved.ok(), why_failed(moved));
        return nodes.moved_by("rdma") != before;
    };
    auto fails = [&] {
        soft_verbs().soft_verbs_script("devices=1 virtual fail=1:12");
        CHECK_FALSE(by_rdma());
        soft_verbs().soft_verbs_script("devices=1 virtual");
    };
    // It fails, is left alone for so long, and then carries what comes.
    auto flap = [&](uint64_t pause_ms) {
        CAPTURE(pause_ms);
        fails();
        CHECK_FALSE(by_rdma());
        soft_verbs().soft_verbs_pass((pause_ms - kMarginMs) * kMs);
        CHECK_FALSE(by_rdma());
        soft_verbs().soft_verbs_pass(2 * kMarginMs * kMs);
        CHECK(by_rdma());
        CHECK(by_rdma());
    };
    for (uint64_t pause_ms : {500, 1000, 2000, 4000}) flap(pause_ms);
    // It is good for 61 s, and idle meanwhile: then it has one fault less, and no connection.
    soft_verbs().soft_verbs_pass(61'000 * kMs);
    const uint64_t limit = now_ns() + 60'000 * kMs;
    while (VerbsBed::count("pairs") != 0 && now_ns() < limit) std::this_thread::yield();
    REQUIRE(VerbsBed::count("pairs") == 0);
    CHECK(by_rdma());
    for (uint64_t pause_ms : {4000, 8000, 16'000, 32'000, 60'000, 60'000}) flap(pause_ms);
}

TEST_CASE("rdma: a batch costs one call, one completion, and no look at memory for what is short") {
    VerbsBed bed("devices=1");
    Nodes nodes({"rdma"}, kMiB);
    nodes.warm_up("rdma");
    struct Batch {
        size_t slices;
        uint64_t bytes;  // of each
        Direction direction;
        uint64_t posts, requests, inlined;
    };
    for (const Batch& batch :
         {Batch{1, 8, Direction::kWrite, 1, 2, 1}, Batch{1, 8, Direction::kRead, 1, 1, 0},
          Batch{63, 64, Direction::kWrite, 1, 64, 63}, Batch{64, 65, Direction::kWrite, 1, 65, 0},
          Batch{64, 8, Direction::kRead, 1, 64, 0}, Batch{65, 8, Direction::kWrite, 2, 67, 65},
          Batch{128, 512, Direction::kRead, 2, 128, 0}}) {
        CAPTURE(batch.slices);
        CAPTURE(batch.bytes);
        CAPTURE(static_cast<int>(batch.direction));
        std::vector<Slice> slices = small_ones(nodes, batch.slices, batch.bytes, batch.direction);
        REQUIRE(nodes.pair.transfer(slices).ok());  // by now the rail's rate is known
        std::vector<uint64_t> before;
        const std::vector<const char*> names = {"posts", "requests", "signaled", "inlined"};
        for (const char* name : names) before.push_back(VerbsBed::count(name));
        REQUIRE(nodes.pair.transfer(slices).ok());
        const std::vector<uint64_t> expected = {batch.posts, batch.requests, batch.posts, batch.inlined};
        for (size_t i = 0; i < names.size(); ++i) {
            CHECK_MESSAGE(VerbsBed::count(names[i]) - before[i] == expected[i], names[i]);
        }
    }
}
