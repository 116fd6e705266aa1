// What a client asks the directory, and what it gets. Values only; directory_client.hpp sends them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "directory/types.hpp"

namespace moonpool {

struct LocateOptions {
    bool prefix = false;      // stop at the first key without a holder, and count whole blocks only,
    uint16_t width = 1;       // of so many keys each
    bool suspects = false;    // also holders that are suspect now: for removals
    uint8_t holders_max = 0;  // of one key, nearest tier first; 0: all (255)
};

struct LocateAnswer {
    Located keys;
    std::shared_ptr<const Members> members;  // knows every holder named in keys
};

struct PlaceOptions {
    std::vector<NodeId> avoid_nodes;
    std::vector<std::string> avoid_host_ids;
    bool evict = false;  // also nodes without free room, where older blocks than elsewhere would go for it
};

}  // namespace moonpool
