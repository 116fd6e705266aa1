// The topology of a machine for Python: values, read once and never changed.

#include <pybind11/stl.h>

#include <string>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "topology/machine.hpp"

namespace moonpool::python {

namespace {

using namespace topology;

const char* kind_text(DeviceKind kind) {
    switch (kind) {
        case DeviceKind::kNic:
            return "nic";
        case DeviceKind::kGpu:
            return "gpu";
        case DeviceKind::kNvme:
            return "nvme";
        case DeviceKind::kDax:
            return "dax";
    }
    return "";
}

DeviceKind kind_of(const std::string& text) {
    for (DeviceKind kind : {DeviceKind::kNic, DeviceKind::kGpu, DeviceKind::kNvme, DeviceKind::kDax}) {
        if (text == kind_text(kind)) return kind;
    }
    raise(Error{Code::kInvalidArgument, "a kind of device is nic, gpu, nvme or dax, not " + text}, "rank");
}

using Row = std::tuple<Device, std::string, int, bool>;

std::vector<Row> rows(const std::vector<Ranked>& ranked) {
    std::vector<Row> found;
    for (const Ranked& one : ranked) {
        found.emplace_back(*one.device, nearness_name(one.nearness), one.distance, one.preferred);
    }
    return found;
}

}  // namespace

void bind_topology(py::module_& m) {
    py::class_<MemoryNode>(m, "MemoryNode", "A NUMA node; without CPUs it is memory alone. Sizes in bytes.")
        .def_readonly("id", &MemoryNode::id)
        .def_readonly("cpus", &MemoryNode::cpus)
        .def_readonly("total_bytes", &MemoryNode::total_bytes)
        .def_readonly("free_bytes", &MemoryNode::free_bytes)
        .def_readonly("distances", &MemoryNode::distances, "(node, distance); 10 is the node itself.");
    py::class_<Gid>(m, "Gid", "An entry of an RDMA port's table of addresses.")
        .def_readonly("index", &Gid::index)
        .def_readonly("address", &Gid::address)
        .def_readonly("type", &Gid::type)
        .def_readonly("net", &Gid::net);
    py::class_<Port>(m, "RdmaPort", "A port of an RDMA device. What cannot be read is \"\" or 0.")
        .def_readonly("number", &Port::number)
        .def_readonly("state", &Port::state)
        .def_readonly("physical", &Port::physical)
        .def_readonly("link_layer", &Port::link_layer)
        .def_readonly("gbit_per_s", &Port::gbit_per_s)
        .def_readonly("lid", &Port::lid)
        .def_readonly("gids", &Port::gids);
    py::class_<Net>(m, "NetDevice", "A network device; mbit_per_s is -1 where the kernel does not tell it.")
        .def_readonly("name", &Net::name)
        .def_readonly("state", &Net::state)
        .def_readonly("mbit_per_s", &Net::mbit_per_s)
        .def_readonly("mtu", &Net::mtu);
    py::class_<Device>(m, "MachineDevice",
                       "A NIC, GPU, NVMe drive or DAX device, and where it is plugged in.")
        .def_property_readonly("kind", [](const Device& d) { return std::string(kind_text(d.kind)); })
        .def_readonly("name", &Device::name)
        .def_property_readonly("pci", [](const Device& d) { return d.place.pci; })
        .def_property_readonly("bridges", [](const Device& d) { return d.place.bridges; })
        .def_property_readonly(
            "node", [](const Device& d) { return d.place.node; }, "-1: unknown.")
        .def_readonly("model", &Device::model)
        .def_readonly("state", &Device::state)
        .def_readonly("bytes", &Device::bytes)
        .def_readonly("ports", &Device::ports)
        .def_readonly("nets", &Device::nets);
    py::class_<Machine>(m, "Machine", "Memory, CPUs and devices of a machine, as its kernel describes them.")
        .def(py::init([](const std::string& root) {
                 py::gil_scoped_release nogil;
                 return read_machine(root);
             }),
             py::arg("root") = "", "root: a prefix of /sys and /proc. What cannot be read is left out.")
        .def_readonly("nodes", &Machine::nodes)
        .def_readonly("devices", &Machine::devices)
        .def_readonly("allowed_cpus", &Machine::allowed_cpus)
        .def_readonly("allowed_nodes", &Machine::allowed_nodes)
        .def(
            "near_node",
            [](const Machine& machine, int node, const std::string& kind) {
                return rows(rank(machine, origin_of_node(node), kind_of(kind)));
            },
            py::arg("node"), py::arg("kind"),
            "(device, \"switch\", \"root port\", \"node\" or \"far\", NUMA distance or -1, whether it is as "
            "near as the first), the near ones first.")
        .def(
            "near_device",
            [](const Machine& machine, const Device& device, const std::string& kind) {
                return rows(rank(machine, origin_of_device(device), kind_of(kind)));
            },
            py::arg("device"), py::arg("kind"), "The same for memory of a device.");
}

}  // namespace moonpool::python
