#include "transport/nic/near_ports.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace moonpool::transport::nic {

topology::Machine machine_for(const std::vector<NearPort>& ports, const std::string& root) {
    return ports.size() > 1 ? topology::read_machine(root) : topology::Machine{};
}

std::vector<std::string> cards_of(const topology::Machine& machine) {
    std::vector<std::string> cards;
    for (const topology::Device& device : machine.devices) {
        if (device.kind == topology::DeviceKind::kGpu) cards.push_back(device.place.pci);
    }
    return cards;
}

void rank_ports(const topology::Machine& machine, std::vector<NearPort>& ports) {
    auto rank_for = [&](int node, const topology::Origin& origin) {
        int tier = -1;
        std::optional<std::pair<topology::Nearness, int>> last;
        // Near ones first. A device that has none of these ports makes no tier.
        for (const topology::Ranked& ranked : topology::rank(machine, origin, topology::DeviceKind::kNic)) {
            for (NearPort& port : ports) {
                if (port.device != ranked.device->name) continue;
                std::pair now{ranked.nearness, ranked.distance};
                if (now != last) ++tier;
                last = now;
                port.tiers[node] = tier;
            }
        }
        for (NearPort& port : ports) port.tiers.try_emplace(node, tier + 1);
    };
    for (const topology::MemoryNode& node : machine.nodes) {
        rank_for(node.id, topology::origin_of_node(node.id));
    }
    int card = kFirstCard;
    for (const topology::Device& device : machine.devices) {
        if (device.kind == topology::DeviceKind::kGpu) rank_for(card++, topology::origin_of_device(device));
    }
}

std::vector<size_t> choose_ports(const std::vector<NearPort>& ports, size_t n, uint32_t turn) {
    std::vector<size_t> left(ports.size()), chosen;
    std::iota(left.begin(), left.end(), size_t{0});
    if (ports.size() <= n) return left;
    std::ranges::sort(left, {}, [&](size_t i) { return i ^ turn; });
    std::set<int> nodes;
    for (const NearPort& port : ports) {
        for (const auto& [node, tier] : port.tiers) {
            if (node < kFirstCard) nodes.insert(node);
        }
    }
    // Cards that it is among the nearest to, of which none was chosen.
    auto cards = [&](size_t i) {
        return std::ranges::count_if(ports[i].tiers, [&](const auto& row) {
            auto is_near = [&](size_t k) { return ports[k].tier(row.first) == 0; };
            return row.first >= kFirstCard && row.second == 0 && std::ranges::none_of(chosen, is_near);
        });
    };
    if (nodes.empty()) nodes.insert(-1);  // of which no port is known to be near
    while (chosen.size() < n) {
        for (int node : nodes) {
            if (chosen.size() == n) break;
            auto cost = [&](size_t i) {
                return std::tuple(ports[i].tier(node), -ports[i].gbit_s, -cards(i));
            };
            auto best = std::ranges::min_element(left, {}, cost);
            chosen.push_back(*best);
            left.erase(best);
        }
    }
    std::ranges::sort(chosen);
    return chosen;
}

}  // namespace moonpool::transport::nic
