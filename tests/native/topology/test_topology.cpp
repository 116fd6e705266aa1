// The topology on recorded machines (tests/machines), and on trees that nothing should make.
#include <doctest/doctest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "../random.hpp"
#include "recorded.hpp"
#include "topology/machine.hpp"
#include "topology/tree.hpp"

using namespace moonpool::topology;
using moonpool::testing::Recorded;
namespace fs = std::filesystem;

namespace {

std::vector<std::string> names(const std::vector<Ranked>& ranked, bool preferred_only = true) {
    std::vector<std::string> found;
    for (const Ranked& one : ranked) {
        if (one.preferred || !preferred_only) found.push_back(one.device->name);
    }
    return found;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("topology: a DGX H100, whose GPUs each have a NIC behind their PCI switch") {
    Recorded recorded("dgx_h100");
    Machine machine = recorded.machine();
    REQUIRE(machine.nodes.size() == 2);
    CHECK(machine.nodes[0].cpus.size() == 112);
    CHECK(machine.nodes[1].cpus.front() == 56);
    CHECK(machine.nodes[1].total_bytes == uint64_t{1008} << 30);
    CHECK(machine.nodes[1].free_bytes == uint64_t{504} << 30);
    CHECK(machine.allowed_cpus.size() == 224);
    CHECK(machine.allowed_nodes == std::vector<int>{0, 1});

    const Device* gpu3 = machine.device(DeviceKind::kGpu, "0000:61:00.0");
    REQUIRE(gpu3 != nullptr);
    CHECK(gpu3->name == "gpu3");
    CHECK(gpu3->model == "NVIDIA H100 80GB HBM3");
    CHECK(gpu3->place.bridges == Names{"pci0000:5b", "0000:5b:01.0", "0000:5c:00.0", "0000:5d:02.0"});
    const char* nic_of[] = {"mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"};
    for (int i = 0; i < 8; ++i) {
        const Device* gpu = machine.device(DeviceKind::kGpu, "gpu" + std::to_string(i));
        REQUIRE(gpu != nullptr);
        std::vector<Ranked> nics = rank(machine, origin_of_device(*gpu), DeviceKind::kNic);
        CHECK(names(nics) == Names{nic_of[i]});
        CHECK(nics[0].nearness == Nearness::kSwitch);
        CHECK(nics[1].nearness == Nearness::kNode);
        CHECK(nics[1].device->place.node == gpu->place.node);
        CHECK(nics.back().nearness == Nearness::kFar);
        CHECK(nics.back().distance == (nics.back().device->place.node == kUnknown ? kUnknown : 21));
        CHECK(nics.size() == 14);
    }
    std::vector<Ranked> of_node = rank(machine, origin_of_node(1), DeviceKind::kNic);
    CHECK(names(of_node) == Names{"mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"});
    // A virtual device has no place, and comes last.
    CHECK(names(of_node, false).back() == "docker0");
    // Storage near NICs, as a transport from file to network asks.
    std::vector<Ranked> drives =
        rank(machine, origin_of_device(*machine.device(DeviceKind::kNic, "mlx5_2")), DeviceKind::kNvme);
    CHECK(names(drives) == Names{"nvme2", "nvme3", "nvme4", "nvme5"});
    CHECK(drives.size() == 10);
    CHECK(drives[0].device->bytes == uint64_t{3'840'000'000'000} / 512 * 512);
    CHECK(drives[0].device->state == "live");
}

TEST_CASE("topology: ports, GIDs and network devices of NICs") {
    Recorded recorded("dgx_h100");
    Machine machine = recorded.machine();
    const Device* nic = machine.device(DeviceKind::kNic, "mlx5_8");
    REQUIRE(nic != nullptr);
    CHECK(nic->model == "MT4129");
    REQUIRE(nic->ports.size() == 1);
    const Port& port = nic->ports[0];
    CHECK(port.state == "ACTIVE");
    CHECK(port.physical == "LinkUp");
    CHECK(port.link_layer == "Ethernet");
    CHECK(port.gbit_per_s == 200);
    REQUIRE(port.gids.size() == 4);  // the empty entry is left out
    CHECK(port.gids[3].index == 3);
    CHECK(port.gids[3].address == "0000:0000:0000:0000:0000:ffff:0a00:0807");
    CHECK(port.gids[3].type == "RoCE v2");
    CHECK(port.gids[3].net == "enp170s0f1np1");
    REQUIRE(nic->nets.size() == 1);
    CHECK(nic->nets[0].mtu == 9000);
    CHECK(nic->nets[0].mbit_per_s == 200000);
    CHECK(machine.device(DeviceKind::kNic, "enp170s0f1np1") == nullptr);  // it is mlx5_8's
    const Device* down = machine.device(DeviceKind::kNic, "mlx5_7");
    REQUIRE(down != nullptr);
    CHECK(down->ports[0].state == "DOWN");
    CHECK(down->nets[0].mbit_per_s == kUnknown);
    CHECK(machine.device(DeviceKind::kNic, "mlx5_4")->ports[0].lid == 5);
    const Device* plain = machine.device(DeviceKind::kNic, "eno3");
    REQUIRE(plain != nullptr);
    CHECK(plain->ports.empty());
    CHECK(plain->place.pci == "0000:04:00.0");
}

TEST_CASE("topology: a node that the firmware tells by the bridge above a device only") {
    Recorded recorded("two_sockets");
    Machine machine = recorded.machine();
    CHECK(machine.device(DeviceKind::kNic, "mlx5_0")->place.node == 0);
    CHECK(names(rank(machine, origin_of_node(0), DeviceKind::kNic)) == Names{"mlx5_0"});
    CHECK(names(rank(machine, origin_of_node(1), DeviceKind::kNic), false) == Names{"mlx5_1", "mlx5_0"});
    std::vector<Ranked> unknown = rank(machine, origin_of_node(7), DeviceKind::kNic);
    CHECK(names(unknown) == Names{"mlx5_0", "mlx5_1"});  // all are as good
    CHECK(unknown[0].distance == kUnknown);
}

TEST_CASE("topology: memory without CPUs, soft RoCE, a DAX device, functions of one port") {
    Recorded recorded("cxl");
    Machine machine = recorded.machine();
    REQUIRE(machine.nodes.size() == 3);
    CHECK(machine.nodes[2].cpus.empty());
    CHECK(machine.nodes[2].total_bytes == uint64_t{256} << 30);
    // The expander is at the first socket: its NICs are nearer.
    std::vector<Ranked> nics = rank(machine, origin_of_node(2), DeviceKind::kNic);
    CHECK(names(nics, false) == Names{"rxe0", "eth1"});
    CHECK(names(nics) == Names{"rxe0"});
    CHECK(nics[0].nearness == Nearness::kFar);
    CHECK(nics[0].distance == 14);
    // Without a parent it is where its network device is.
    CHECK(nics[0].device->place.pci == "0000:21:00.0");
    CHECK(nics[0].device->ports[0].gbit_per_s == 2.5);
    const Device* dax = machine.device(DeviceKind::kDax, "dax1.0");
    REQUIRE(dax != nullptr);
    CHECK(dax->place.node == 2);
    CHECK(dax->bytes == uint64_t{256} << 30);
    CHECK(dax->place.pci == "0000:c1:00.0");
    const Device* amd = machine.device(DeviceKind::kGpu, "0000:81:00.1");
    REQUIRE(amd != nullptr);
    CHECK(rank(machine, origin_of_device(*amd), DeviceKind::kNic)[0].nearness == Nearness::kRootPort);
}

TEST_CASE("topology: virtual machines, with PCI and without") {
    Recorded firecracker("mmio_vm");
    Machine machine = firecracker.machine();
    REQUIRE(machine.nodes.size() == 1);  // a kernel without NUMA
    CHECK(machine.nodes[0].cpus == std::vector<int>{0, 1, 2, 3});
    CHECK(machine.nodes[0].total_bytes == uint64_t{8142316} << 10);
    REQUIRE(machine.devices.size() == 1);
    CHECK(machine.devices[0].name == "eth0");
    CHECK(machine.devices[0].place.pci.empty());
    CHECK(rank(machine, origin_of_node(0), DeviceKind::kNic)[0].nearness == Nearness::kNode);

    Recorded virtio("virtio_vm");
    machine = virtio.machine();
    REQUIRE(machine.nodes.size() == 1);
    const Device* nic = machine.device(DeviceKind::kNic, "eth0");
    REQUIRE(nic != nullptr);
    CHECK(nic->place.pci == "0000:00:03.0");
    CHECK(nic->place.node == 0);  // numa_node is -1, and there is one node
    CHECK(nic->nets[0].mbit_per_s == kUnknown);
    CHECK(nic->nets[0].mtu == 1400);
}

TEST_CASE("topology: soft RoCE on NICs of two nodes, as a real kernel shows it") {
    Recorded recorded("rxe_vm");
    Machine machine = recorded.machine();
    REQUIRE(machine.nodes.size() == 3);
    CHECK(machine.nodes[2].cpus.empty());
    CHECK(names(rank(machine, origin_of_node(1), DeviceKind::kNic), false) ==
          Names{"rxe1", "rxe3", "rxe0", "rxe2"});
    CHECK(names(rank(machine, origin_of_node(2), DeviceKind::kNic)) == Names{"rxe0", "rxe2"});
    const Device* nic = machine.device(DeviceKind::kNic, "rxe1");
    REQUIRE(nic != nullptr);
    CHECK(nic->place.pci == "0000:41:00.0");
    CHECK(nic->nets[0].name == "eth0");
    REQUIRE(nic->ports.size() == 1);
    CHECK(nic->ports[0].gids.back().address == "0000:0000:0000:0000:0000:ffff:0a07:0002");
    CHECK(nic->ports[0].gids.back().type == "RoCE v2");
}

TEST_CASE("topology: the machine that runs this") {
    Machine machine = read_machine();
    CHECK_FALSE(machine.nodes.empty());
    CHECK(machine.nodes[0].total_bytes > 0);
    CHECK_FALSE(machine.allowed_cpus.empty());
}

TEST_CASE("topology: nothing, and files that are none") {
    CHECK(read_machine("/tmp/moonpool/no/such/machine").nodes.size() == 1);
    Recorded tree;
    CHECK(tree.machine().devices.empty());
    const std::string net = "/sys/class/net/";
    // Links in a circle, into nothing, and out of the tree.
    tree.link(net + "a", "b");
    tree.link(net + "b", "a");
    tree.link(net + "gone", "../../devices/gone");
    tree.write("/sys/devices/pci0000:00/0000:00:01.0/net/eth0/mtu", "1500");
    tree.link(net + "eth0", "../../devices/pci0000:00/0000:00:01.0/net/eth0");
    tree.link("/sys/devices/pci0000:00/0000:00:01.0/net/eth0/device", "../../../0000:00:01.0");
    tree.link("/sys/devices/pci0000:00/0000:00:01.0/net/eth0/device/loop", ".");
    Recorded outside("two_sockets");
    tree.link("/sys/class/infiniband/out", outside.root() + "/sys/class/infiniband/mlx5_0");
    // A pipe, which would keep its reader waiting, and a folder.
    fs::create_directories(tree.root() + "/sys/devices/system/node/node0/cpulist");
    REQUIRE(::mkfifo((tree.root() + "/sys/devices/system/node/node0/meminfo").c_str(), 0600) == 0);
    tree.write("/sys/devices/system/node/node0/distance", "ten");
    tree.write("/sys/devices/system/node/node00/cpulist", "0");
    tree.write("/sys/devices/system/node/node99999999999999999999/cpulist", "0");
    tree.write("/sys/devices/system/node/node-1/cpulist", "0");
    Machine machine = tree.machine();
    REQUIRE(machine.nodes.size() == 1);
    CHECK(machine.nodes[0].cpus.empty());
    CHECK(machine.nodes[0].total_bytes == 0);
    CHECK(machine.nodes[0].distances.empty());
    CHECK(machine.device(DeviceKind::kNic, "eth0")->place.pci == "0000:00:01.0");
    const Device* out = machine.device(DeviceKind::kNic, "out");
    REQUIRE(out != nullptr);
    CHECK(out->place.pci.empty());
    CHECK(machine.devices.size() == 2);
}

TEST_CASE("topology: numbers, lists and names of any form") {
    CHECK(numbers_of("0-3,8") == std::vector<int>{0, 1, 2, 3, 8});
    CHECK(numbers_of("") == std::vector<int>{});
    CHECK(numbers_of("3-1,x,-2,5-,7,,0-4294967296,9-99999,1") == std::vector<int>{1, 7});
    CHECK(numbers_of("2,1,2,1-2") == std::vector<int>{1, 2});
    std::string many;
    for (int i = 0; i < 5000; ++i) many += "0-65535,";
    CHECK(numbers_of(many).size() == 65536);
    CHECK(natural_less("mlx5_2", "mlx5_10"));
    CHECK_FALSE(natural_less("mlx5_10", "mlx5_2"));
    CHECK_FALSE(natural_less("a", "a"));
    CHECK(natural_less("node", "node0"));
    Recorded tree;
    tree.write("/text", std::string("  a\xff\x1b[2J b \n"));
    tree.write("/long", std::string(1 << 20, 'x'));
    tree.write("/hex", "0x10de\n");
    tree.write("/minus", "-1\n");
    tree.write("/large", "99999999999999999999\n");
    Tree files(tree.root());
    CHECK(files.text("/text") == "a??[2J b");
    CHECK(files.text("/long")->size() == kTextBytesMax);
    CHECK(files.number("/hex") == 0x10de);
    CHECK(files.number("/minus") == -1);
    CHECK_FALSE(files.number("/large"));
    CHECK_FALSE(files.text("/none"));
    CHECK(files.real("/hex") == "/hex");
    CHECK(files.real("/..") == "");
}

TEST_CASE("topology: values of a recorded machine that are wrong in any way never end the reader") {
    moonpool::testing::Random random;
    const std::string values[] = {
        "",        "-1",  "0x",           "9223372036854775808",  "-9223372036854775808",
        "0-65535", "nan", "1e999 Gb/sec", std::string(3000, '9'), "\n\n\n",
        "4: ",     ": :", "pci"};
    for (const char* name : {"two_sockets", "cxl"}) {
        Recorded recorded(name);
        std::vector<std::string> paths;
        for (const auto& entry : fs::recursive_directory_iterator(recorded.root())) {
            if (!entry.is_symlink() && entry.is_regular_file()) paths.push_back(entry.path());
        }
        std::ranges::sort(paths);
        for (int round = 0; round < 60; ++round) {
            for (int i = 0; i < 8; ++i) {
                const std::string& value = values[random.below(std::size(values))];
                std::ofstream(paths[random.below(paths.size())]) << value;
            }
            Machine machine = recorded.machine();
            REQUIRE_FALSE(machine.nodes.empty());
            for (const Device& device : machine.devices) {
                CHECK((device.place.node == kUnknown || machine.node(device.place.node) != nullptr));
                for (DeviceKind kind : {DeviceKind::kNic, DeviceKind::kGpu, DeviceKind::kNvme}) {
                    std::vector<Ranked> ranked = rank(machine, origin_of_device(device), kind);
                    CHECK((ranked.empty() || ranked[0].preferred));
                }
            }
        }
    }
}
