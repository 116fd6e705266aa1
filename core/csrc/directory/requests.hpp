// What a client asks the directory, and what it gets. Values only; directory_client.hpp sends them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "directory/types.hpp"
#include "directory/version.hpp"

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
    // In a pool of several ranges those whose master did not answer, and why: of their keys nothing is known,
    // and no holder is named.
    uint32_t ranges = 1;
    std::map<uint32_t, Error> unreached{};

    // Why nothing is known of that key; null: its master has answered.
    const Error* unknown(const Hash128& hash) const {
        auto why = unreached.find(range_of(hash, ranges));
        return why == unreached.end() ? nullptr : &why->second;
    }
};

// Of a key that is to be put where no node has it: whether another value stands there.
enum class Taken : uint8_t {
    kFree = 0,      // it is the asking client's to put, as a replacement of what nodes may have that are away
    kHeld = 1,      // a node has it, as far as the master has heard
    kBeingPut = 2,  // another client is about to put it, or has, and the row is on its way
    kNew = 3,       // it is the asking client's to put, and there is nothing to replace
};

inline bool is_free(Taken taken) { return taken == Taken::kFree || taken == Taken::kNew; }

// What a removal or replacement begins with: holders, suspect ones too, and a place in the order for each
// key.
struct OrderAnswer {
    LocateAnswer at;
    std::vector<Version> versions;  // empty: a master of the release before, which gives none
    uint64_t epoch = 0;             // of at.members
    bool filling = false;           // the master may not know all nodes yet
    std::vector<Taken> taken{};     // where it was asked for; empty: a master that does not say
};

// How it ended, of some keys.
struct OrderDone {
    std::vector<Hash128> keys{};
    std::vector<Version> versions{};
    uint64_t epoch = 0;
    std::vector<std::vector<NodeId>> told{},
        placed{};  // of each key: which nodes know, and which have the new bytes
};

struct PlaceOptions {
    std::vector<NodeId> avoid_nodes;
    std::vector<std::string> avoid_host_ids;
    bool evict = false;  // also nodes without free room, where older blocks than elsewhere would go for it
};

}  // namespace moonpool
