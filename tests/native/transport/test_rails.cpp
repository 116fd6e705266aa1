// Which rail carries what: devices by name, those near the memory first, and none left waiting for another.
#include <atomic>
#include <set>
#include <thread>

#include "../topology/recorded.hpp"
#include "base/clock.hpp"
#include "bed.hpp"
#include "transport/nic/near_ports.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::nic::NearPort;

namespace {

constexpr size_t kMiB = 1u << 20;

std::vector<NearPort> ports_of(const std::vector<std::string>& devices) {
    std::vector<NearPort> ports;
    for (const std::string& device : devices) ports.push_back({.device = device});
    return ports;
}

using Tiers = std::vector<int>;

Tiers tiers(const char* machine, const std::vector<std::string>& devices, int node) {
    Recorded recorded(machine);
    std::vector<NearPort> ports = ports_of(devices);
    transport::nic::rank_ports(recorded.machine(), ports);
    Tiers found;
    for (const NearPort& port : ports) found.push_back(port.tier(node));
    return found;
}

std::atomic<int> memory_node{0};
int told_node(const void*) { return memory_node; }

// Two engines over two rails by the stub's clock, whose devices are plugged in as the NICs of the recorded
// machine with two sockets: soft0 at node 0, soft1 at node 1.
struct TwoSockets {
    explicit TwoSockets(int node, bool with_both = true) {
        memory_node = node;
        recorded.link("/sys/class/infiniband/soft0",
                      "../../devices/pci0000:30/0000:30:02.0/0000:31:00.0/infiniband/mlx5_0");
        recorded.link("/sys/class/infiniband/soft1",
                      "../../devices/pci0000:b0/0000:b0:02.0/0000:b1:00.0/infiniband/mlx5_1");
        pair.emplace(options("here"), options("there"));
        mine.emplace(*pair->here, 16 * kMiB, MemoryKind::kHost);
        theirs.emplace(*pair->there, 16 * kMiB, MemoryKind::kHostArena);
        // The memory has its keys.
        for (size_t at = 0; at < mine->size(); at += kMiB) transfer(at, 1);
        // Both rails were used and measured.
        for (int round = 0; with_both && round < 4; ++round) transfer(0, mine->size());
    }
    EngineOptions options(const char* name) const {
        EngineOptions made = engine_options(name, "rdma");
        made.rdma.clock_ns = soft_verbs().soft_verbs_now;
        made.machine = recorded.root();
        made.rdma.node_of = told_node;
        made.rdma.window_bytes = kMiB;
        return made;
    }
    void transfer(size_t at, size_t bytes) {
        Result<uint64_t> moved =
            pair->transfer({{mine->address() + at, theirs->address() + at, bytes, Direction::kWrite}});
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
    }
    // -> the share that the device carried.
    double share(int device, int times, size_t bytes) {
        const char* names[] = {"bytes0", "bytes1"};
        uint64_t before[] = {VerbsBed::count("bytes0"), VerbsBed::count("bytes1")};
        for (int i = 0; i < times; ++i) transfer(0, bytes);
        double moved[] = {static_cast<double>(VerbsBed::count(names[0]) - before[0]),
                          static_cast<double>(VerbsBed::count(names[1]) - before[1])};
        return moved[device] / (moved[0] + moved[1]);
    }

    Recorded recorded{"two_sockets"};
    std::optional<Pair> pair;
    std::optional<Memory> mine, theirs;
};

}  // namespace

TEST_CASE("rdma: devices are chosen by name, and a wrong name is refused with those that there are") {
    VerbsBed bed("devices=3");
    EngineOptions options = engine_options("here", "rdma");
    options.rdma.devices = {"soft2", "soft0"};
    CHECK(Engine::create(options).ok());
    auto why = [](const EngineOptions& wrong) {
        Result<std::shared_ptr<Engine>> made = Engine::create(wrong);
        REQUIRE(!made.ok());
        CHECK(made.error().code == Code::kInvalidArgument);
        return made.error().text;
    };
    options.rdma.devices = {"soft1", "mlx5_7"};
    CHECK(why(options) == "no RDMA device of this host is called \"mlx5_7\"; it has soft0, soft1, soft2");
    options.transports = {"tcp"};
    CHECK(
        why(options).find("given the RDMA device soft1, and cannot use it: it is not among the transports") !=
        std::string::npos);
    // A port that is down is no wrong name.
    soft_verbs().soft_verbs_script("devices=1 down0");
    options = engine_options("here", "");
    options.rdma.devices = {"soft0"};
    CHECK(Engine::create(options).ok());
    soft_verbs().soft_verbs_script("devices=none");
    CHECK(why(options).find("and cannot use it: libibverbs finds no RDMA device") != std::string::npos);
}

TEST_CASE("rdma: ports are near memory as recorded machines say") {
    const std::vector<std::string> two = {"mlx5_0", "mlx5_1"};
    CHECK(tiers("two_sockets", two, 0) == Tiers{0, 1});
    CHECK(tiers("two_sockets", two, 1) == Tiers{1, 0});
    CHECK(tiers("two_sockets", two, 7) == Tiers{0, 0});   // no such node
    CHECK(tiers("two_sockets", two, -1) == Tiers{0, 0});  // the kernel does not tell
    // Of those in use only: a far one may be the nearest.
    CHECK(tiers("two_sockets", {"mlx5_1"}, 0) == Tiers{0});
    CHECK(tiers("two_sockets", {"mlx5_1", "of_no_tree"}, 0) == Tiers{0, 1});
    const std::vector<std::string> eight = {"mlx5_0", "mlx5_3", "mlx5_9", "mlx5_10"};
    CHECK(tiers("dgx_h100", eight, 0) == Tiers{0, 0, 1, 1});
    CHECK(tiers("dgx_h100", eight, 1) == Tiers{1, 1, 0, 0});
    // A node without CPUs, 30 from node 0 and 40 from node 1.
    const std::vector<std::string> soft = {"rxe0", "rxe1", "rxe2", "rxe3"};
    Tiers near_0 = tiers("rxe_vm", soft, 0);
    CHECK(std::ranges::count(near_0, 0) == 2);
    CHECK(tiers("rxe_vm", soft, 2) == near_0);
}

TEST_CASE(
    "rdma: ports are near memory of cards by the switch, then by the port of the CPU, then by the node") {
    const std::vector<std::string> some = {"mlx5_0", "mlx5_3", "mlx5_1", "mlx5_9"};
    using transport::nic::kFirstCard;
    // The first card is behind the switch of mlx5_0; mlx5_3 and mlx5_1 are at its node, mlx5_9 is not.
    CHECK(tiers("dgx_h100", some, kFirstCard) == Tiers{0, 1, 1, 2});
    CHECK(tiers("dgx_h100", some, kFirstCard + 1) == Tiers{1, 0, 1, 2});
    CHECK(tiers("dgx_h100", some, kFirstCard + 8) == Tiers{0, 0, 0, 0});  // there are eight
    CHECK(transport::nic::cards_of(Recorded("dgx_h100").machine()).at(1) == "0000:43:00.0");
}

TEST_CASE("rdma: of more ports than there may be rails those are chosen that are near to each node") {
    using Places = std::vector<size_t>;
    Recorded recorded("dgx_h100");
    std::vector<std::string> names = {"of_no_tree", "of_none_either"};
    for (int i = 0; i < 12; ++i) names.push_back("mlx5_" + std::to_string(i));
    std::vector<NearPort> ports = ports_of(names);
    transport::nic::rank_ports(recorded.machine(), ports);
    auto near = [&](const Places& places, int node) {
        return std::ranges::count_if(places, [&](size_t i) { return ports[i].tier(node) == 0; });
    };
    for (size_t n : {2, 8, 12}) {
        CAPTURE(n);
        Places places = transport::nic::choose_ports(ports, n);
        CHECK(places.size() == n);
        CHECK(std::ranges::is_sorted(places));
        CHECK(places.front() >= 2);
        CHECK(near(places, 0) == static_cast<long>(n / 2));
        CHECK(near(places, 1) == static_cast<long>(n / 2));
    }
    CHECK(transport::nic::choose_ports(ports, 14).size() == 14);
    CHECK(transport::nic::choose_ports(ports, 20).size() == 14);
    // Of equally near ones the fastest, then the first.
    const size_t fast = 2 + 5;
    REQUIRE(ports[fast].tier(0) == 0);
    ports[fast].gbit_s = 400;
    Places two = transport::nic::choose_ports(ports, 2);
    CHECK(std::ranges::count(two, fast) == 1);
    ports[fast].gbit_s = 0;
    // One for each card, before those that are near to none.
    auto near_card = [&](int card) {
        return [&ports, card](size_t i) { return ports[i].tier(transport::nic::kFirstCard + card) == 0; };
    };
    const Places eight = transport::nic::choose_ports(ports, 8);
    for (int card = 0; card < 8; ++card) CHECK(std::ranges::count_if(eight, near_card(card)) == 1);
    // Each of these in its turn.
    std::set<size_t> used;
    for (uint32_t turn = 0; turn < 16; ++turn) {
        for (size_t i : transport::nic::choose_ports(ports, 4, turn)) used.insert(i);
    }
    CHECK(std::ranges::equal(used, eight));
    // Where nothing is known of any.
    CHECK(transport::nic::choose_ports(ports_of({"a", "b", "c"}), 2) == Places{0, 1});
}

TEST_CASE("rdma: with ten ports the eight near ones carry") {
    VerbsBed bed("devices=10");
    Recorded recorded("two_sockets");
    for (int i = 2; i < 10; ++i) {  // soft0 and soft1 are in no tree
        recorded.link("/sys/class/infiniband/soft" + std::to_string(i),
                      i % 2 == 0 ? "../../devices/pci0000:30/0000:30:02.0/0000:31:00.0/infiniband/mlx5_0"
                                 : "../../devices/pci0000:b0/0000:b0:02.0/0000:b1:00.0/infiniband/mlx5_1");
    }
    auto options = [&](const char* name) {
        EngineOptions made = engine_options(name, "rdma");
        made.machine = recorded.root();
        return made;
    };
    Pair pair(options("here"), options("there"));
    Memory mine(*pair.here, 4 * kMiB, MemoryKind::kHost), theirs(*pair.there, 4 * kMiB, MemoryKind::kHost);
    Random random(941);
    mine.fill(random);
    const uint64_t before[] = {VerbsBed::count("bytes0"), VerbsBed::count("bytes1")};
    for (int round = 0; round < 4; ++round) {
        REQUIRE(pair.transfer({{mine.address(), theirs.address(), mine.size(), Direction::kWrite}}).ok());
    }
    CHECK(mine.bytes() == theirs.bytes());
    CHECK(VerbsBed::count("bytes0") == before[0]);
    CHECK(VerbsBed::count("bytes1") == before[1]);
    const std::vector<SegmentPath> paths = *pair.here->paths(pair.segment);
    auto path = std::ranges::find(paths, "rdma", &SegmentPath::transport);
    REQUIRE(path != paths.end());
    CHECK_MESSAGE(path->path == "rdma soft2:1 10.8.2.1 to soft2:1 10.8.2.1 and 7 more", path->path);
}

TEST_CASE("rdma: the rail near the memory comes first, and the far one helps where that is slow") {
    for (int near : {0, 1}) {
        CAPTURE(near);
        VerbsBed bed("devices=2 virtual speed0=400 speed1=400");
        TwoSockets nodes(near);
        CHECK(nodes.share(near, 50, 64u << 10) == 1);
        double of_large = nodes.share(near, 4, 16 * kMiB);
        MESSAGE("the near one of two carries " << of_large << " of a large transfer");
        CHECK(of_large >= 0.45);
        CHECK(of_large < 0.8);
        // By the measured rate: what is near and slow is the farther way.
        soft_verbs().soft_verbs_script(near == 0 ? "devices=2 virtual speed0=20 speed1=400"
                                                 : "devices=2 virtual speed0=400 speed1=20");
        (void)nodes.share(near, 20, 256u << 10);
        CHECK(nodes.share(near, 50, 256u << 10) < 0.1);
    }
}

TEST_CASE("rdma: of rails that are not connected the best one is, whatever is small enough for one") {
    for (int near : {0, 1}) {
        CAPTURE(near);
        VerbsBed bed("devices=2 virtual speed0=400 speed1=400");
        {
            TwoSockets nodes(near, false);
            CHECK(nodes.share(near, 20, 4096) == 1);
            CHECK(VerbsBed::count("pairs") == 2);
        }
        TwoSockets nodes(near);
        soft_verbs().soft_verbs_script(near == 0 ? "devices=2 virtual speed0=20 speed1=400"
                                                 : "devices=2 virtual speed0=400 speed1=20");
        (void)nodes.share(near, 20, 256u << 10);
        soft_verbs().soft_verbs_pass(120'000'000'000);  // they were idle: both connections go
        const uint64_t limit = now_ns() + 60'000'000'000;
        while (VerbsBed::count("pairs") != 0 && now_ns() < limit) std::this_thread::yield();
        REQUIRE(VerbsBed::count("pairs") == 0);
        CHECK(nodes.share(near, 20, 256u << 10) == 0);
    }
}

TEST_CASE("rdma: of idle rails one takes a small transfer") {
    VerbsBed bed("devices=2 virtual speed0=400 speed1=400");
    TwoSockets nodes(-1);  // no rail is nearer
    for (size_t bytes : {1, 4096, 65536, 100000, 262144, 300000}) {
        for (int i = 0; i < 10; ++i) nodes.transfer(0, bytes);
    }
}
