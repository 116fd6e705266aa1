// RDMA between ports that have several addresses: which of them are tried, and what is told of the others.
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
