#include "transport/rdma/near_ports.hpp"

#include <optional>
#include <utility>

namespace moonpool::transport::rdma {

void rank_ports(const topology::Machine& machine, const std::vector<std::shared_ptr<Port>>& ports) {
    for (const topology::MemoryNode& node : machine.nodes) {
        int tier = -1;
        std::optional<std::pair<topology::Nearness, int>> last;
        // Near ones first. A device that has none of these ports makes no tier.
        for (const topology::Ranked& ranked :
             topology::rank(machine, topology::origin_of_node(node.id), topology::DeviceKind::kNic)) {
            for (const auto& port : ports) {
                if (port->device_name() != ranked.device->name) continue;
                std::pair now{ranked.nearness, ranked.distance};
                if (now != last) ++tier;
                last = now;
                port->tiers[node.id] = tier;
            }
        }
        for (const auto& port : ports) port->tiers.try_emplace(node.id, tier + 1);
    }
}

}  // namespace moonpool::transport::rdma
