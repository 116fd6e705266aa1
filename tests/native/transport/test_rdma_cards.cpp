// Memory of cards over RDMA, on the software device and the software libibverbs: by which way a NIC gets its
// keys, what is told when there is none, and that no key outlives a region. That bytes of each kind of memory
// arrive is the conformance suite's.
#include <array>

#include "../topology/recorded.hpp"
#include "bed.hpp"
#include "transport/rdma/device.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport::rdma;

namespace {

constexpr size_t kCardBytes = 3u << 20;  // of more chunks than one
constexpr const char* kExport = "cuMemGetHandleForAddressRange";

EngineOptions cards_options(const std::string& name, std::vector<std::string> transports) {
    EngineOptions options = engine_options(name, "");
    options.transports = std::move(transports);
    return options;
}

// Writes and reads of all sizes that are treated alike, between memory of a card here and any there.
void check_both_ways(Pair& pair, Memory& mine, Memory& theirs, Random& random) {
    for (Direction direction : {Direction::kWrite, Direction::kRead}) {
        mine.fill(random);
        theirs.fill(random);
        Bytes here = mine.bytes(), there = theirs.bytes();
        std::vector<Slice> slices;
        uint64_t at = 0;
        for (uint64_t bytes : {1u, 63u, 64u, 65u, 4096u, 200'000u, 1'500'000u}) {
            slices.push_back({mine.address() + at, theirs.address() + at, bytes, direction});
            bool write = direction == Direction::kWrite;
            std::memcpy(write ? &there[at] : &here[at], write ? &here[at] : &there[at], bytes);
            at += bytes + 1000;
        }
        Result<uint64_t> moved = pair.transfer(slices);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        REQUIRE(mine.bytes() == here);
        REQUIRE(theirs.bytes() == there);
    }
}

uint64_t moved_by(Pair& pair, const std::string& transport) {
    return metric(*pair.here, transport + "_write_bytes_total") +
           metric(*pair.here, transport + "_read_bytes_total");
}

}  // namespace

TEST_CASE("rdma: a NIC reads and writes memory of cards by dma-buf, on one side and on both") {
    using enum MemoryKind;
    Random random(2701);
    for (auto [here, there] : {std::pair{kDevice, kHost}, {kHostArena, kDevice}, {kDevice, kDevice}}) {
        CAPTURE(kind_name(here));
        CAPTURE(kind_name(there));
        Bed bed;
        {
            VerbsBed nics("devices=2 relaxed");
            Pair pair(cards_options("here", {"rdma"}), cards_options("there", {"rdma", "tcp"}));
            Memory mine(*pair.here, kCardBytes, here), theirs(*pair.there, kCardBytes, there);
            check_both_ways(pair, mine, theirs, random);
            CHECK(soft_device().soft_calls(kExport) > 0);
            SegmentInfo seen = *pair.here->segment(pair.segment);
            for (const SegmentRegion& region : seen.regions) {
                CHECK(region.transport == "rdma");
            }
        }
        bed.end();
    }
}

TEST_CASE("rdma: the NIC that is near to a card carries what one can carry of its memory") {
    for (const size_t near : {0, 1}) {
        CAPTURE(near);
        // Two NICs at one NUMA node, each below a port of the CPU of its own, and the card beside one of
        // them.
        Recorded machine("two_sockets");
        const std::string roots[] = {"/pci0000:90/0000:90:01.0", "/pci0000:a0/0000:a0:01.0"};
        for (size_t i : {0, 1}) {
            const std::string nic = "soft" + std::to_string(i), folder = roots[i] + "/0000:91:00." + nic[4];
            machine.write("/sys/devices" + folder + "/numa_node", "1");
            machine.write("/sys/devices" + folder + "/infiniband/" + nic + "/hca_type", "soft");
            machine.link("/sys/class/infiniband/" + nic, "../../devices" + folder + "/infiniband/" + nic);
        }
        const std::string card = roots[near] + "/ffff:a0:00.0";  // as the software driver calls it
        machine.write("/sys/devices" + card + "/class", "0x030200");
        machine.write("/sys/devices" + card + "/vendor", "0x10de");
        machine.write("/sys/devices" + card + "/numa_node", "1");
        machine.link("/sys/bus/pci/devices/ffff:a0:00.0", "../../../devices" + card);
        Bed bed;
        {
            VerbsBed nics("devices=2");
            EngineOptions here = cards_options("here", {"rdma"});
            here.machine = machine.root();
            Pair pair(here, cards_options("there", {"rdma", "tcp"}));
            Memory mine(*pair.here, kCardBytes, MemoryKind::kDevice);
            Memory theirs(*pair.there, kCardBytes, MemoryKind::kHost);
            const uint64_t before[] = {VerbsBed::count("bytes0"), VerbsBed::count("bytes1")};
            for (int round = 0; round < 20; ++round) {
                Result<uint64_t> moved =
                    pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}});
                REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
            }
            const char* counts[] = {"bytes0", "bytes1"};
            CHECK(VerbsBed::count(counts[near]) - before[near] >= 20 * 4096);
            CHECK(VerbsBed::count(counts[1 - near]) == before[1 - near]);
        }
        bed.end();
    }
}

TEST_CASE("rdma: without dma-buf a card's addresses are keys, where the module for that is loaded") {
    Random random(2702);
    Bed bed;
    {
        VerbsBed nics("devices=1 nodmabuf");
        Pair pair(cards_options("here", {"rdma"}), cards_options("there", {"rdma", "tcp"}));
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, kCardBytes));
        char* seen = soft_device().soft_at(card.address(), card.bytes());
        soft_verbs().soft_verbs_peermem(card.address(), card.bytes(), seen);
        REQUIRE(pair.there->register_region(card.address(), kCardBytes, "").ok());
        Memory mine(*pair.here, kCardBytes, MemoryKind::kHost);
        mine.fill(random);
        std::vector<Slice> slices = {{mine.address(), card.address(), kCardBytes, Direction::kWrite}};
        Result<uint64_t> moved = pair.transfer(slices);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        CHECK(std::memcmp(mine.data(), seen, kCardBytes) == 0);
        REQUIRE(pair.there->deregister_region(card.address()).ok());
    }
    bed.end();
}

TEST_CASE("rdma: memory of a card for which a NIC has no key goes another way, or the reason is told") {
    struct Host {
        const char* script;
        const char* hidden;  // of the driver
        const char* says;
    };
    Random random(2703);
    for (const Host& host :
         {Host{"devices=1 nodmabuf", "", "the NIC takes no dma-buf of the card"},
          Host{"devices=1", kExport, "the CUDA driver of this system exports no memory as dma-buf"}}) {
        CAPTURE(host.script);
        Bed bed;
        if (*host.hidden != 0) {
            bed.device.reset();
            soft_device().soft_hide(host.hidden);
            device::Driver::use_library_for_tests(soft_library());  // asks for it anew
            bed.device = device::must(device::Device::open(0));
        }
        for (bool local : {true, false}) {
            CAPTURE(local);
            VerbsBed nics(host.script);
            auto kind = [&](bool card) { return card ? MemoryKind::kDevice : MemoryKind::kHost; };
            {
                Pair pair(cards_options("here", {"rdma", "tcp"}), cards_options("there", {"rdma", "tcp"}));
                Memory mine(*pair.here, kCardBytes, kind(local));
                Memory theirs(*pair.there, kCardBytes, kind(!local));
                check_both_ways(pair, mine, theirs, random);
                CHECK(moved_by(pair, "rdma") == 0);
                CHECK(moved_by(pair, "tcp") != 0);
            }
            Pair pair(cards_options("here", {"rdma"}), cards_options("there", {"rdma", "tcp"}));
            Memory mine(*pair.here, kCardBytes, kind(local)), theirs(*pair.there, kCardBytes, kind(!local));
            Result<uint64_t> moved =
                pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}});
            REQUIRE_FALSE(moved.ok());
            const std::string& why = moved.error().text;
            CHECK_MESSAGE(why.find(host.says) != std::string::npos, why);
            CHECK_MESSAGE(why.find("modprobe nvidia-peermem") != std::string::npos, why);
        }
        bed.end();
    }
}

TEST_CASE("rdma: a libibverbs without dma-buf says so of a card's memory") {
    Bed bed;
    {
        VerbsBed nics("devices=1");
        Verbs old = **open_verbs(soft_verbs_library());
        old.reg_dmabuf_mr = nullptr;
        Result<Nics> opened = open_nics(old);
        REQUIRE(opened.ok());
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, kCardBytes));
        auto key = opened->devices.front()->make_card_key(*bed.device, card.address(), kCardBytes);
        REQUIRE_FALSE(key.ok());
        CHECK_MESSAGE(key.error().text.find("libibverbs lacks ibv_reg_dmabuf_mr") == 0, key.error().text);
        CHECK(key.error().text.find("nvidia_peermem") != std::string::npos);
    }
    bed.end();
}

TEST_CASE("rdma: no NIC writes to a card whose kernels might not see it") {
    Bed bed;
    {
        VerbsBed nics("devices=1");
        soft_device().soft_set_capability(70);
        auto old = device::must(device::Device::open(0));
        Result<Nics> opened = open_nics(**open_verbs(soft_verbs_library()));
        REQUIRE(opened.ok());
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(old, kCardBytes));
        auto key = opened->devices.front()->make_card_key(*old, card.address(), kCardBytes);
        REQUIRE_FALSE(key.ok());
        CHECK_MESSAGE(key.error().text.find("the card's kernels may not see") == 0, key.error().text);
        CHECK(soft_device().soft_calls(kExport) == 0);
    }
    bed.end();
}

TEST_CASE("rdma: the keys of a card's memory end with its region, also amid transfers") {
    Random random(2704);
    Bed bed;
    {
        VerbsBed nics("devices=1");
        Pair pair(cards_options("here", {"rdma"}), cards_options("there", {"rdma", "tcp"}));
        Memory mine(*pair.here, kCardBytes, MemoryKind::kHost);
        auto theirs = std::make_unique<Memory>(*pair.there, kCardBytes, MemoryKind::kDevice);
        check_both_ways(pair, mine, *theirs, random);
        const uint64_t with = VerbsBed::count("objects"), address = theirs->address();
        REQUIRE(pair.there->deregister_region(address).ok());
        CHECK(VerbsBed::count("objects") == with - 3);  // a key for each MiB
        Bytes before = theirs->bytes();
        for (int round = 0; round < 3; ++round) {
            Result<uint64_t> moved = pair.transfer({{mine.address(), address, 4096, Direction::kWrite}});
            REQUIRE_FALSE(moved.ok());
            CHECK_MESSAGE(
                moved.error().text.find("lies in no registered region of the peer") != std::string::npos,
                moved.error().text);
        }
        CHECK(theirs->bytes() == before);
    }
    bed.end();
}
