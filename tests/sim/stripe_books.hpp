// What has to hold of striped objects when everything is well again and each client has read each key.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "history.hpp"
#include "store/node/pool.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool::sim {

// Of the simulated cluster: manifests bear its mac.
const Secrets& cluster_secrets();

// What a stripe holds: the value of the operation that put it, and its number.
std::string stripe_of(uint64_t value, uint64_t number);

// No manifest stays that has lost a stripe; a client says EXISTS of what it reads, and of nothing else; and
// no stripe stays without a manifest, but for those that docs/store.md names: their manifest ended with its
// node, or was dropped by order of a master (lost: groups of their stripes), their writer or remover ended,
// or had no answer from a node or the master. none_lost: no node lost or refused anything. Then a key that
// was replaced, and not removed, is read, if each of its replacements was acknowledged.
std::optional<Finding> check_stripes(const std::vector<const Pool*>& pools,
                                     const std::vector<Operation>& history, uint32_t keys,
                                     const std::set<std::string>& lost, bool none_lost);

}  // namespace moonpool::sim
