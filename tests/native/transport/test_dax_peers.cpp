// Memory of a DAX device between engines of one host: mapped by the peer at its own path to the device, where
// that is the same one.
#include "../memory/dax_machine.hpp"
#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kSize = 300'000;

// -> whether a write and a read of all of it went well, by what, and why not.
void check(const DaxMachine& here, const DaxMachine& there, const std::vector<std::string>& transports,
           bool by_shm, bool goes = true) {
    EngineOptions mine = engine_options("here", ""), theirs = engine_options("there", "");
    mine.transports = transports;
    mine.machine = here.root();
    theirs.machine = there.root();
    Pair pair(mine, theirs);
    Result<std::shared_ptr<transport::Memory>> dax = pair.there->allocate(kSize, "dax:/dev/dax0.0");
    REQUIRE_MESSAGE(dax.ok(), (dax.ok() ? "" : dax.error().text));
    Memory local(*pair.here, kSize, MemoryKind::kHost);
    Random random(331);
    local.fill(random);
    const std::vector<std::byte> bytes = local.bytes();
    auto remote = reinterpret_cast<uint64_t>((*dax)->data());
    for (Direction direction : {Direction::kWrite, Direction::kRead}) {
        Result<uint64_t> moved = pair.transfer({{local.address() + 1, remote + 1, kSize - 1, direction}});
        REQUIRE_MESSAGE(moved.ok() == goes, (moved.ok() ? "it went" : moved.error().text));
        if (!goes) {
            CHECK(moved.error().text.find("/dev/dax0.0 is another device here than at the peer") !=
                  std::string::npos);
            continue;
        }
        CHECK(std::memcmp((*dax)->data() + 1, bytes.data() + 1, kSize - 1) == 0);
        if (direction == Direction::kWrite) std::memset(local.data(), 0, kSize);
    }
    if (goes) CHECK(std::memcmp(local.data() + 1, bytes.data() + 1, kSize - 1) == 0);
    CHECK((metric(*pair.here, "shm_write_bytes_total") != 0) == by_shm);
    CHECK(pair.there->deregister_region(remote));
    CHECK(!pair.transfer({{local.address(), remote, 1, Direction::kRead}}).ok());
}

}  // namespace

TEST_CASE("dax: engines of one host share a device that they prove to be the same") {
    DaxMachine machine, other;
    machine.add("dax0.0", 8u << 20);
    other.add("dax0.0", 8u << 20);
    check(machine, machine, {"shm"}, true);
    check(machine, machine, {"tcp"}, false);
    check(machine, machine, {"loopback"}, false);
    check(other, machine, {"shm"}, false, false);
    check(other, machine, {"shm", "tcp"}, false);
    std::shared_ptr<Engine> engine = make_engine(engine_options("alone", ""));
    Result<std::shared_ptr<transport::Memory>> none = engine->allocate(1, "dax:/dev/dax0.0x");
    REQUIRE(!none.ok());
    CHECK(none.error().code == Code::kInvalidArgument);
}
