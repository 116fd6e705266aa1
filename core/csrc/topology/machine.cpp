#include "topology/machine.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "topology/tree.hpp"

namespace moonpool::topology {

namespace {

constexpr std::string_view kHex = "0123456789abcdef";

bool all_of(std::string_view text, std::string_view letters) {
    return !text.empty() && text.find_first_not_of(letters) == std::string_view::npos;
}

// "0000:18:00.0"
bool is_pci_function(std::string_view name) {
    size_t colon = name.find(':');
    return name.size() >= 12 && colon != std::string_view::npos && name.size() == colon + 8 &&
           all_of(name.substr(0, colon), kHex) && all_of(name.substr(colon + 1, 2), kHex) &&
           name[colon + 3] == ':' && all_of(name.substr(colon + 4, 2), kHex) && name[colon + 6] == '.' &&
           all_of(name.substr(colon + 7), "01234567");
}

// "pci0000:15"
bool is_host_bridge(std::string_view name) {
    return name.starts_with("pci") && all_of(name.substr(3), "0123456789abcdef:");
}

// The rest of "4: ACTIVE".
std::string after_colon(const std::string& text) {
    size_t colon = text.find(": ");
    return colon == std::string::npos ? text : text.substr(colon + 2);
}

// The value of the line "Name: value", white space stripped; "" for none.
std::string field(std::string_view text, std::string_view name) {
    while (!text.empty()) {
        std::string_view line = text.substr(0, text.find('\n'));
        text.remove_prefix(std::min(line.size() + 1, text.size()));
        size_t at = line.find(name);
        if (at == std::string_view::npos) continue;
        line.remove_prefix(at + name.size());
        line.remove_prefix(std::min(line.find_first_not_of(": \t"), line.size()));
        return std::string(line);
    }
    return "";
}

uint64_t kib_field(std::string_view text, std::string_view name) {
    std::string value = field(text, name);
    uint64_t kib = 0;
    auto [_, bad] = std::from_chars(value.data(), value.data() + value.size(), kib);
    return bad == std::errc() && kib < (UINT64_MAX >> 10) ? kib << 10 : 0;
}

class MachineReader {
   public:
    explicit MachineReader(const std::string& root) : tree_(root) {}

    Machine read() {
        read_nodes();
        std::string status = text("/proc/self/status");
        machine_.allowed_cpus = numbers_of(field(status, "Cpus_allowed_list"));
        machine_.allowed_nodes = numbers_of(field(status, "Mems_allowed_list"));
        read_nics();
        read_gpus();
        read_drives();
        read_dax();
        return std::move(machine_);
    }

   private:
    std::string text(const std::string& path) const { return tree_.text(path).value_or(""); }
    int number(const std::string& path, int otherwise) const {
        std::optional<int64_t> found = tree_.number(path);
        return found && std::in_range<int>(*found) ? static_cast<int>(*found) : otherwise;
    }

    void read_nodes() {
        const std::string folder = "/sys/devices/system/node";
        std::vector<int> ids;
        for (const std::string& name : tree_.names(folder)) {
            if (!name.starts_with("node")) continue;
            std::vector<int> id = numbers_of(std::string_view(name).substr(4));
            if (id.size() == 1 && name == "node" + std::to_string(id[0])) ids.push_back(id[0]);
        }
        for (int id : ids) {
            const std::string base = folder + "/node" + std::to_string(id);
            MemoryNode node{.id = id, .cpus = numbers_of(text(base + "/cpulist"))};
            std::string memory = text(base + "/meminfo");
            node.total_bytes = kib_field(memory, "MemTotal");
            node.free_bytes = kib_field(memory, "MemFree");
            node.distances = distances(text(base + "/distance"), ids);
            machine_.nodes.push_back(std::move(node));
        }
        if (!machine_.nodes.empty()) return;
        // A kernel without NUMA has no such folder.
        std::string memory = text("/proc/meminfo");
        machine_.nodes.push_back({.id = 0,
                                  .cpus = numbers_of(text("/sys/devices/system/cpu/online")),
                                  .total_bytes = kib_field(memory, "MemTotal"),
                                  .free_bytes = kib_field(memory, "MemFree"),
                                  .distances = {{0, 10}}});
    }

    // "10 21", one for each node in the order of their ids.
    static std::vector<std::pair<int, int>> distances(std::string_view list, const std::vector<int>& ids) {
        std::vector<std::pair<int, int>> found;
        for (int id : ids) {
            list.remove_prefix(std::min(list.find_first_not_of(' '), list.size()));
            int distance = 0;
            auto [end, bad] = std::from_chars(list.data(), list.data() + list.size(), distance);
            if (bad != std::errc() || distance <= 0) break;
            list.remove_prefix(static_cast<size_t>(end - list.data()));
            found.emplace_back(id, distance);
        }
        return found;
    }

    // `path`: of a class or bus, as "/sys/class/infiniband/mlx5_0".
    Place place_of(const std::string& path) const {
        Place place;
        std::string real = tree_.real(path);
        std::string device;  // the path of its PCI function
        int node = kUnknown;
        for (size_t at = 0; at < real.size();) {
            size_t end = std::min(real.find('/', at), real.size());
            std::string name = real.substr(at, end - at);
            at = end + 1;
            if (is_host_bridge(name)) place.bridges.push_back(name);
            if (!is_pci_function(name)) continue;
            if (!place.pci.empty()) place.bridges.push_back(place.pci);
            place.pci = name;
            device = real.substr(0, end);
            // What the firmware does not tell of a device it may tell of a bridge above it.
            int told = number(device + "/numa_node", kUnknown);
            if (told != kUnknown) node = told;
        }
        if (place.pci.empty()) place.bridges.clear();
        if (device.empty() && !real.empty()) {
            device = real + "/device";
            node = number(device + "/numa_node", kUnknown);
        }
        place.node = node_or_only(node);
        return place;
    }

    // Where there is one node, everything is at it.
    int node_or_only(int node) const {
        if (machine_.nodes.size() == 1) return machine_.nodes.front().id;
        return machine_.node(node) == nullptr ? kUnknown : node;
    }

    // ---- network

    void read_nics() {
        for (const std::string& name : tree_.names("/sys/class/infiniband")) {
            machine_.devices.push_back(rdma_device(name));
        }
        size_t with_rdma = machine_.devices.size();
        for (const std::string& name : tree_.names("/sys/class/net")) {
            // Also files stand there, as bonding_masters.
            if (name == "lo" || !tree_.text("/sys/class/net/" + name + "/mtu")) continue;
            auto owns = [&](const Device& nic) {
                return std::ranges::find(nic.nets, name, &Net::name) != nic.nets.end();
            };
            if (std::any_of(machine_.devices.begin(), machine_.devices.begin() + with_rdma, owns)) continue;
            machine_.devices.push_back({.kind = DeviceKind::kNic,
                                        .name = name,
                                        .place = place_of("/sys/class/net/" + name),
                                        .nets = {net_device(name)}});
        }
    }

    Device rdma_device(const std::string& name) {
        const std::string base = "/sys/class/infiniband/" + name;
        Device nic{.kind = DeviceKind::kNic, .name = name, .place = place_of(base)};
        nic.model = text(base + "/hca_type");
        std::vector<std::string> nets;
        const std::string device = base + "/device";
        if (!nic.place.pci.empty()) nets = tree_.names(device + "/net");
        for (const std::string& number : tree_.names(base + "/ports")) {
            std::vector<int> is_number = numbers_of(number);
            if (is_number.size() != 1) continue;
            nic.ports.push_back(port(base + "/ports/" + number, is_number.front()));
            for (const Gid& gid : nic.ports.back().gids) {
                if (!gid.net.empty() && std::ranges::find(nets, gid.net) == nets.end())
                    nets.push_back(gid.net);
            }
        }
        for (const std::string& net : nets) nic.nets.push_back(net_device(net));
        // Soft RoCE has no parent: its network device has one.
        if (nic.place.pci.empty() && !nets.empty()) nic.place = place_of("/sys/class/net/" + nets.front());
        return nic;
    }

    Port port(const std::string& base, int number) const {
        Port port{.number = number};
        port.state = after_colon(text(base + "/state"));
        port.physical = after_colon(text(base + "/phys_state"));
        port.link_layer = text(base + "/link_layer");
        port.lid = this->number(base + "/lid", 0);
        std::string rate = text(base + "/rate");  // "400 Gb/sec (4X NDR)"
        double gbit = 0;
        auto [_, bad] = std::from_chars(rate.data(), rate.data() + rate.size(), gbit);
        if (bad == std::errc() && gbit > 0 && gbit < 1e6) port.gbit_per_s = gbit;
        for (const std::string& index : tree_.names(base + "/gids")) {
            std::string address = text(base + "/gids/" + index);
            bool empty = address.find_first_not_of("0:") == std::string::npos;
            std::vector<int> is_number = numbers_of(index);
            if (empty || is_number.size() != 1) continue;
            port.gids.push_back({is_number.front(), address, text(base + "/gid_attrs/types/" + index),
                                 text(base + "/gid_attrs/ndevs/" + index)});
        }
        return port;
    }

    Net net_device(const std::string& name) const {
        Net net{.name = name};
        if (name.find('/') != std::string::npos) return net;
        const std::string base = "/sys/class/net/" + name;
        net.state = text(base + "/operstate");
        net.mtu = number(base + "/mtu", 0);
        int64_t mbit = tree_.number(base + "/speed").value_or(kUnknown);
        if (mbit > 0 && mbit < 100'000'000) net.mbit_per_s = mbit;
        return net;
    }

    // ---- cards, drives, memory devices

    static bool is_gpu(int pci_class, int vendor) {
        constexpr int kAmd = 0x1002, kNvidia = 0x10de, kIntel = 0x8086;
        int kind = pci_class >> 8;
        // Controllers of 3D and accelerators. A plain VGA adapter is a card of one of these makers, or the
        // picture of a server's management processor.
        if (kind == 0x0302 || kind == 0x1200) return vendor == kAmd || vendor == kNvidia || vendor == kIntel;
        return (kind == 0x0300 || kind == 0x0380) && (vendor == kAmd || vendor == kNvidia);
    }

    void read_gpus() {
        int count = 0;
        for (const std::string& pci : pci_functions()) {
            const std::string base = "/sys/bus/pci/devices/" + pci;
            if (!is_gpu(number(base + "/class", 0), number(base + "/vendor", 0))) continue;
            Device gpu{.kind = DeviceKind::kGpu, .name = "gpu" + std::to_string(count++)};
            gpu.place = place_of(base);
            gpu.model = field(text("/proc/driver/nvidia/gpus/" + pci + "/information"), "Model");
            machine_.devices.push_back(std::move(gpu));
        }
    }

    // By address: hexadecimal, which is not the natural order of names.
    std::vector<std::string> pci_functions() const {
        std::vector<std::string> found = tree_.names("/sys/bus/pci/devices");
        std::erase_if(found, [](const std::string& name) { return !is_pci_function(name); });
        std::ranges::sort(found, [](const std::string& a, const std::string& b) {
            return std::pair(a.size(), a) < std::pair(b.size(), b);
        });
        return found;
    }

    void read_drives() {
        for (const std::string& name : tree_.names("/sys/class/nvme")) {
            const std::string base = "/sys/class/nvme/" + name;
            Device drive{.kind = DeviceKind::kNvme, .name = name, .place = place_of(base)};
            drive.model = text(base + "/model");
            drive.state = text(base + "/state");
            for (const std::string& part : tree_.names(base)) {
                if (!part.starts_with("nvme")) continue;  // its namespaces
                int64_t sectors = tree_.number(base + "/" + part + "/size").value_or(0);
                if (sectors > 0 && sectors < (int64_t{1} << 50)) drive.bytes += uint64_t{512} * sectors;
            }
            machine_.devices.push_back(std::move(drive));
        }
    }

    void read_dax() {
        for (const std::string& name : tree_.names("/sys/bus/dax/devices")) {
            const std::string base = "/sys/bus/dax/devices/" + name;
            Device dax{.kind = DeviceKind::kDax, .name = name, .place = place_of(base)};
            // The node that its memory would become, else the one that it is near to.
            int node = number(base + "/target_node", kUnknown);
            if (machine_.node(node) == nullptr) node = number(base + "/numa_node", kUnknown);
            dax.place.node = node_or_only(node);
            int64_t bytes = tree_.number(base + "/size").value_or(0);
            dax.bytes = bytes > 0 ? static_cast<uint64_t>(bytes) : 0;
            machine_.devices.push_back(std::move(dax));
        }
    }

    Tree tree_;
    Machine machine_;
};

}  // namespace

Machine read_machine(const std::string& root) { return MachineReader(root).read(); }

}  // namespace moonpool::topology
