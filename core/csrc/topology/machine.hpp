// Machine: the memory, CPUs and devices of a host as its kernel describes them, and which device is near
// which memory. A pure function of the files below a root, so that tests describe machines; read once, when
// transports are made or a person asks, never in a transfer.
//
//   Machine machine = read_machine();
//   for (const Ranked& nic : rank(machine, origin_of_node(0), DeviceKind::kNic)) ...   // the near ones first
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::topology {

inline constexpr int kUnknown = -1;  // of a node; also the distance of what lies at no known node

// A NUMA node.
struct MemoryNode {
    int id = 0;
    std::vector<int> cpus{};  // empty: memory without CPUs, as a CXL expander has
    uint64_t total_bytes = 0;
    uint64_t free_bytes = 0;
    std::vector<std::pair<int, int>> distances{};  // (node, distance); 10 is the node itself
};

// Where a device is plugged in.
struct Place {
    std::string pci{};  // its PCI function, "0000:18:00.0"; empty: it has none
    std::vector<std::string>
        bridges{};  // above it, from the host bridge down: "pci0000:15", "0000:15:01.0", ...
    int node = kUnknown;
};

// One entry of an RDMA port's table that is not empty.
struct Gid {
    int index = 0;
    std::string address{};  // "0000:0000:0000:0000:0000:ffff:0a00:0007"
    std::string type{};     // "RoCE v2", "IB/RoCE v1"
    std::string net{};      // its network device; empty for InfiniBand
};

struct Port {
    int number = 1;
    std::string state{};       // "ACTIVE", "DOWN", ...; empty: unreadable, as of all texts here
    std::string physical{};    // "LinkUp", "Polling", "Disabled"
    std::string link_layer{};  // "Ethernet", "InfiniBand"
    double gbit_per_s = 0;
    int lid = 0;
    std::vector<Gid> gids{};
};

struct Net {
    std::string name{};
    std::string state{};  // "up", "down", "unknown"
    int64_t mbit_per_s = kUnknown;
    int mtu = 0;
};

enum class DeviceKind : uint8_t { kNic, kGpu, kNvme, kDax };

struct Device {
    DeviceKind kind = DeviceKind::kNic;
    // As the kernel calls it: "mlx5_0" or, without RDMA, "eth0"; "nvme0"; "dax0.0". A GPU: "gpu" and its
    // number in the order of PCI addresses.
    std::string name{};
    Place place{};
    std::string model{};
    std::string state{};        // of a drive: "live"
    uint64_t bytes = 0;         // of a drive or a DAX device
    std::vector<Port> ports{};  // of RDMA; empty: none
    std::vector<Net> nets{};    // network devices of a NIC
};

struct Machine {
    std::vector<MemoryNode> nodes;   // at least one, by id
    std::vector<Device> devices;     // by kind, then in natural order of names; GPUs by PCI address
    std::vector<int> allowed_cpus;   // of this process, by its cpuset and affinity
    std::vector<int> allowed_nodes;  // whose memory it may take

    const MemoryNode* node(int id) const;
    // By name or PCI function; null: none.
    const Device* device(DeviceKind kind, std::string_view name) const;
};

// root: a prefix of /sys and /proc. What cannot be read is left out; never fails.
Machine read_machine(const std::string& root = "");

// How near a device is, nearest first.
enum class Nearness : uint8_t {
    kSwitch,    // below one PCI switch: bytes do not pass the CPU
    kRootPort,  // below one port of the CPU
    kNode,      // at one NUMA node
    kFar,       // elsewhere, or unknown
};
std::string_view nearness_name(Nearness nearness);  // "switch", "root port", "node", "far"

// Where bytes begin: memory of a node, or of a device.
struct Origin {
    int node = kUnknown;
    const Place* place = nullptr;
};
inline Origin origin_of_node(int id) { return {id, nullptr}; }
inline Origin origin_of_device(const Device& device) { return {device.place.node, &device.place}; }

struct Ranked {
    const Device* device;  // of the machine
    Nearness nearness;
    int distance;    // of the NUMA nodes; kUnknown: one of them is not known
    bool preferred;  // as near as the first: a choice among these is for load, not for distance
};

// All devices of the kind, near ones first, equal ones in the machine's order. A link that is down ranks as
// one that is up: the caller knows which it can use.
std::vector<Ranked> rank(const Machine& machine, const Origin& origin, DeviceKind kind);

}  // namespace moonpool::topology
