// Which ports of NICs are near which memory, by the topology of the machine. A pure function of both.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "topology/machine.hpp"

namespace moonpool::transport::nic {

// Memory of a card counts as a node, too: kFirstCard and the card's place among the machine's GPUs.
inline constexpr int kFirstCard = 1 << 20;
// Their PCI functions, "0000:1b:00.0".
std::vector<std::string> cards_of(const topology::Machine& machine);

// Node -> how many tiers of ports are nearer to its memory: 0 for the nearest of those in question, 1 for
// those that are farther than these, and so on. Of what the machine does not know nothing, or the last tier.
using Tiers = std::map<int, int>;

struct NearPort {
    std::string device;  // as the kernel calls it: "mlx5_0"
    double gbit_s = 0;   // 0: not known
    Tiers tiers{};

    // 0: none is nearer, or nothing is known of that node.
    int tier(int node) const {
        auto found = tiers.find(node);
        return found == tiers.end() ? 0 : found->second;
    }
};

// The machine whose files are below `root`; an empty one where there is nothing to choose, since a large one
// has thousands of files.
topology::Machine machine_for(const std::vector<NearPort>& ports, const std::string& root);

// Sets the tiers of all ports.
void rank_ports(const topology::Machine& machine, std::vector<NearPort>& ports);

// Which `n` of these ranked ports to use where an engine cannot use all: for each NUMA node in turn the
// nearest one that was not chosen yet, of equally near ones the fastest, then one that is near to a card of
// which none is yet, then the first. -> their places, ascending. turn: which is the first differs from one to
// the next, so that all are used.
std::vector<size_t> choose_ports(const std::vector<NearPort>& ports, size_t n, uint32_t turn = 0);

}  // namespace moonpool::transport::nic
