// Holders: which node a client asks for which items of a call. Pure; the state machines of the verbs
// (removal_steps.hpp, search_steps.hpp) and Client share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "directory/types.hpp"
#include "store/client/location_cache.hpp"

namespace moonpool {

inline constexpr size_t kAttemptsMax = 3;  // holders that are tried for one key in one call

// Where the client's own node is.
struct OwnPlace {
    std::string host_id;
    Incarnation own{};
};

// Items of a call that one node is asked for.
struct NodeItems {
    Member member;
    std::vector<size_t> items;
};

// The holder to ask; null: none is alive, or all of those are in `tried`. The own node before others of this
// host before the rest; memory before disk; and else spread by `salt`. key: theirs.
const Member* nearest(const OwnPlace& place, const Members& members, const Hash128& key,
                      std::span<const Holder> holders, std::span<const NodeId> tried, uint64_t salt);

// Where this client found or put a key last, as far as that node is alive; else null.
const Member* known_place(LocationCache& locations, const Members& members, const Hash128& hash);

}  // namespace moonpool
