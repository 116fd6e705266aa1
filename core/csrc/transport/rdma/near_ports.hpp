// Which ports are near the memory of which NUMA node, by the topology of the machine. A pure function of
// both.
#pragma once

#include <memory>
#include <vector>

#include "topology/machine.hpp"
#include "transport/rdma/device.hpp"

namespace moonpool::transport::rdma {

// Sets Port::tiers of all ports: for each node of the machine 0 for the nearest of these ports, 1 for those
// that are farther than these, and so on. Ports of which the machine knows nothing are the farthest.
void rank_ports(const topology::Machine& machine, const std::vector<std::shared_ptr<Port>>& ports);

// Which `n` of these ranked ports to use where an engine cannot use all: for each node in turn the nearest
// one that was not chosen yet, of equally near ones the fastest, then the first. -> their places, ascending.
std::vector<size_t> choose_ports(const std::vector<std::shared_ptr<Port>>& ports, size_t n);

}  // namespace moonpool::transport::rdma
