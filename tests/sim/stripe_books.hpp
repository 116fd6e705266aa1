// What has to hold of striped objects when everything is well again and each client has read each key.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "history.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool::sim {

// Of the simulated cluster: manifests bear its mac.
const Secrets& cluster_secrets();

// What a stripe holds: the value of the operation that put it, and its number.
std::string stripe_of(uint64_t value, uint64_t number);

// No manifest stays that has lost a stripe; a client says EXISTS of what it reads, and of nothing else; and
// no stripe stays without a manifest, but for those that docs/store.md names: their manifest ended with its
// node, or was dropped by order of a master (lost: groups of their stripes), their writer or remover ended,
// or had no answer from a node or the master, or no client heard the answer in which a node showed it.
struct LostInStripes {
    std::set<std::string> manifests;  // the groups of their stripes
    // Nodes evicted objects, or their disks have lost some: any manifest may be among them.
    bool any = false;
    // A node's memory may have no room for what its disk has: a read misses what is there, or evicts another
    // object, which the disk did not take.
    bool reads_miss = false;
    // No node lost or refused anything. Then a key that was replaced, and not removed, is read, if each of
    // its replacements was acknowledged.
    bool none = false;
};
// all: what nodes have, by name.
using Contents = std::map<std::string, std::set<std::string>>;
std::optional<Finding> check_stripes(const Contents& all, const std::vector<Operation>& history,
                                     uint32_t keys, const LostInStripes& lost);

}  // namespace moonpool::sim
