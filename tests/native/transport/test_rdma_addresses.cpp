// RDMA between ports that have several addresses: which of them are tried, and what is told of the others.
// And ports that come up, or get other addresses, when engines use RDMA already.
#include "base/clock.hpp"
#include "bed.hpp"
#include "nodes.hpp"
#include "transport/rdma/messages.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport::rdma;

namespace {

void apart(EngineOptions& options) { options.rdma.devices = {options.name == "here" ? "soft0" : "soft1"}; }

SegmentPath path_by_rdma(Engine& engine, uint32_t segment) {
    const std::vector<SegmentPath> paths = *engine.paths(segment);
    for (const SegmentPath& path : paths) {
        if (path.transport == "rdma") return path;
    }
    FAIL("no row of rdma");
    return {};
}

constexpr uint64_t kPatienceNs = 60'000'000'000;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("rdma: where no way leads to one address of a port the next one is tried, and remembered") {
    struct Gone {
        const char* script;
        const char* says;
    };
    for (const Gone& gone :
         {Gone{"devices=2 gids=both gone1=v4",
               "soft0:1 10.8.0.1 does not reach 10.8.1.1: finding the way: Connection timed out"},
          Gone{"devices=2 gids=both gone0=v4",
               "no queue pair of the peer: soft1:1 10.8.1.1 does not reach "
               "10.8.0.1: finding the way: Connection timed out"}}) {
        CAPTURE(gone.script);
        VerbsBed bed(gone.script);
        Nodes nodes({"rdma"}, kMiB, apart);
        CHECK(has(path_by_rdma(*nodes.pair.here, nodes.pair.segment).path,
                  "soft0:1 10.8.0.1 to soft1:1 10.8.1.1"));
        Random random(951);
        nodes.check_transfer(random);
        const SegmentPath path = path_by_rdma(*nodes.pair.here, nodes.pair.segment);
        CHECK_MESSAGE(has(path.path, "soft0:1 fd00::1 to soft1:1 fd00::2"), path.path);
        CHECK_MESSAGE(has(path.remarks, gone.says), path.remarks);
        CHECK_MESSAGE(has(path.remarks, "GID 0 (fe80::1) is RoCE v1, which no router forwards"),
                      path.remarks);
        // The next connection begins with the address that was good: a queue pair on each side, and no more.
        nodes.warm_up("rdma");
        const uint64_t made = VerbsBed::count("pairs_made");
        soft_verbs().soft_verbs_script((std::string(gone.script) + " fail=1:12").c_str());
        nodes.check_transfer(random);
        CHECK(VerbsBed::count("pairs_made") == made + 2);
    }
}

TEST_CASE("rdma: ports are of one kind when any of their addresses are") {
    struct Sides {
        const char* here;
        const char* there;
    };
    for (const Sides& sides :
         {Sides{"both", "v6"}, Sides{"v6", "both"}, Sides{"both", "v4"}, Sides{"v4", "both"}}) {
        CAPTURE(sides.here);
        CAPTURE(sides.there);
        auto script = [](const char* gids) { return std::string("devices=1 gids=") + gids; };
        VerbsBed bed(script(sides.here));
        std::shared_ptr<Engine> here = make_engine(engine_options("here", "rdma"));
        soft_verbs().soft_verbs_script(script(sides.there).c_str());
        std::shared_ptr<Engine> there = make_engine(engine_options("there", ""));
        soft_verbs().soft_verbs_script(script("both").c_str());
        Memory mine(*here, kMiB, MemoryKind::kHost), theirs(*there, kMiB, MemoryKind::kHost);
        Random random(952);
        mine.fill(random);
        uint32_t segment = *here->open(there->addresses().front());
        TransferRequest request;
        std::vector<Slice> slices = {{mine.address(), theirs.address(), mine.size(), Direction::kWrite}};
        request.segments = {&segment, 1};
        request.slices = slices;
        Result<uint64_t> moved = here->transfer(request);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        CHECK(mine.bytes() == theirs.bytes());
        const bool by_ipv4 = std::string(sides.here) == "v4" || std::string(sides.there) == "v4";
        CHECK(has(path_by_rdma(*here, segment).path,
                  by_ipv4 ? "10.8.0.1 to soft0:1 10.8.0.1" : "fd00::1 to soft0:1 fd00::1"));
    }
}

TEST_CASE("rdma: a port that comes up later is used with peers that are opened then, on both sides") {
    VerbsBed bed("devices=2 down1");
    Nodes nodes({"rdma"}, 4 * kMiB);
    nodes.warm_up("rdma");
    auto path_of = [](Engine& engine, uint32_t segment) { return path_by_rdma(engine, segment).path; };
    CHECK_FALSE(has(path_of(*nodes.pair.here, nodes.pair.segment), " and 1 more"));
    soft_verbs().soft_verbs_port(1, 1);
    // This engine has its new port when it finds two rails to an engine that began with both.
    std::shared_ptr<Engine> later;
    uint32_t to_later = 0;
    for (const uint64_t limit = now_ns() + kPatienceNs; now_ns() < limit;) {
        later = make_engine(engine_options("later", "rdma"));
        to_later = *nodes.pair.here->open(later->addresses().front());
        if (has(path_of(*nodes.pair.here, to_later), " and 1 more")) break;
    }
    REQUIRE(has(path_of(*nodes.pair.here, to_later), " and 1 more"));
    // And the peer offers its own one.
    std::shared_ptr<Engine> reader;
    uint32_t to_there = 0;
    for (const uint64_t limit = now_ns() + kPatienceNs; now_ns() < limit;) {
        reader = make_engine(engine_options("reader", "rdma"));
        to_there = *reader->open(nodes.pair.there->addresses().front());
        if (has(path_of(*reader, to_there), " and 1 more")) break;
    }
    REQUIRE(has(path_of(*reader, to_there), " and 1 more"));
    // Memory that was registered before gets its keys for the device.
    Memory into(*later, nodes.mine.size(), MemoryKind::kHost),
        from(*reader, nodes.mine.size(), MemoryKind::kHost);
    auto carried_by_both = [&](Engine& engine, uint32_t segment, const Slice& slice) {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = {&slice, 1};
        const uint64_t before = VerbsBed::count("bytes1");
        for (const uint64_t limit = now_ns() + kPatienceNs; now_ns() < limit;) {
            Result<uint64_t> moved = engine.transfer(request);
            REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            if (VerbsBed::count("bytes1") > before) return true;
        }
        return false;
    };
    const uint64_t size = nodes.mine.size();
    CHECK(carried_by_both(*nodes.pair.here, to_later,
                          {nodes.mine.address(), into.address(), size, Direction::kWrite}));
    CHECK(nodes.mine.bytes() == into.bytes());
    CHECK(
        carried_by_both(*reader, to_there, {from.address(), nodes.theirs.address(), size, Direction::kRead}));
    CHECK(from.bytes() == nodes.theirs.bytes());
}

TEST_CASE("rdma: a port that gets another address is reached by that one") {
    VerbsBed bed("devices=1 gids=v4");
    Nodes nodes({"rdma", "tcp"}, kMiB);
    nodes.warm_up("rdma");
    CHECK(has(path_by_rdma(*nodes.pair.here, nodes.pair.segment).path, "10.8.0.1 to soft0:1 10.8.0.1"));
    soft_verbs().soft_verbs_gids("v6");
    Random random(953);
    // Whenever either engine hears of it: no transfer fails, and in the end they meet.
    std::string path;
    for (const uint64_t limit = now_ns() + kPatienceNs; now_ns() < limit && !has(path, "fd00::1");) {
        soft_verbs().soft_verbs_script("devices=1 gids=v6 fail=1:12");  // the connection ends
        nodes.check_transfer(random);
        path = path_by_rdma(*nodes.pair.here, nodes.pair.segment).path;
    }
    CHECK_MESSAGE(has(path, "fd00::1 to soft0:1 fd00::1"), path);
}
