#include <algorithm>
#include <climits>
#include <tuple>

#include "topology/machine.hpp"

namespace moonpool::topology {

namespace {

// How many bridges two devices have above them in common, from the host bridge down.
size_t shared_bridges(const Place& a, const Place& b) {
    auto [end, _] = std::ranges::mismatch(a.bridges, b.bridges);
    return static_cast<size_t>(end - a.bridges.begin());
}

int distance_between(const Machine& machine, int from, int to) {
    const MemoryNode* node = machine.node(from);
    if (node == nullptr || machine.node(to) == nullptr) return kUnknown;
    for (auto [other, distance] : node->distances) {
        if (other == to) return distance;
    }
    return from == to ? 10 : 20;  // what the kernel assumes where the firmware says nothing
}

Nearness nearness_of(const Origin& origin, const Place& place) {
    size_t shared = origin.place == nullptr ? 0 : shared_bridges(*origin.place, place);
    // A host bridge, a root port, and then the bridges of switches.
    if (shared >= 3) return Nearness::kSwitch;
    if (shared == 2) return Nearness::kRootPort;
    bool unknown = origin.node == kUnknown && place.node == kUnknown;
    if (unknown ? shared == 1 : origin.node == place.node) return Nearness::kNode;
    return Nearness::kFar;
}

}  // namespace

std::string_view nearness_name(Nearness nearness) {
    switch (nearness) {
        case Nearness::kSwitch:
            return "switch";
        case Nearness::kRootPort:
            return "root port";
        case Nearness::kNode:
            return "node";
        case Nearness::kFar:
            return "far";
    }
    return "far";
}

const MemoryNode* Machine::node(int id) const {
    auto found = std::ranges::find(nodes, id, &MemoryNode::id);
    return found == nodes.end() ? nullptr : &*found;
}

const Device* Machine::device(DeviceKind kind, std::string_view name) const {
    auto found = std::ranges::find_if(devices, [&](const Device& device) {
        return device.kind == kind && !name.empty() && (device.name == name || device.place.pci == name);
    });
    return found == devices.end() ? nullptr : &*found;
}

std::vector<Ranked> rank(const Machine& machine, const Origin& origin, DeviceKind kind) {
    std::vector<Ranked> ranked;
    for (const Device& device : machine.devices) {
        if (device.kind != kind) continue;
        int distance = distance_between(machine, origin.node, device.place.node);
        ranked.push_back({&device, nearness_of(origin, device.place), distance, false});
    }
    // Unknown distances come last.
    auto key = [](const Ranked& one) {
        return std::tuple(one.nearness, one.distance == kUnknown ? INT_MAX : one.distance);
    };
    std::ranges::stable_sort(ranked, {}, key);
    for (Ranked& one : ranked) one.preferred = key(one) == key(ranked.front());
    return ranked;
}

}  // namespace moonpool::topology
