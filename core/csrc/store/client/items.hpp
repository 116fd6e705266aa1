// What callers hand to the verbs of the store, and what they get back.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "directory/ranges.hpp"
#include "directory/types.hpp"
#include "directory/version.hpp"
#include "memory/memory_ref.hpp"
#include "store/shared/messages.hpp"

namespace moonpool {

struct PutItem {
    std::string_view name;
    std::string_view parent;  // empty: none
    std::span<const MemoryRef> parts;
    std::string_view group = {};   // what goes with it when a node evicts; empty: nothing
    uint32_t soft_ms = 0;          // a soft pin; 0: none
    Version version = kNoVersion;  // of a replacement, as the master gave it
};

struct PutReport {
    std::vector<PutOutcome> outcomes;
    std::string refusal;  // why, for the items whose outcome is kRefused
    uint64_t stored_bytes = 0;
    RangeVersions known{};        // the removals that the put came after
    bool unanswered = false;      // a node may have carried it out, and has not said so
    std::vector<uint8_t> copies;  // of each stored item, on different hosts; empty: one each
    std::string short_of_copies;  // why there are fewer than asked for
    std::vector<std::pair<size_t, Version>> older;  // items whose outcome is kOlder, and what comes after all
    std::vector<std::pair<size_t, NodeId>> placed;  // items that other nodes took
    std::vector<size_t> manifest_sized;             // items that were there already, and may be striped
    std::vector<size_t> held;  // items of kExists, by what the master has heard, which is some ms old
    // Of each replacement the nodes that may still have an older value, in words; empty: none of all.
    std::vector<std::string> unsure;
};

// What became of a removal, for each key.
struct RemoveReport {
    // 0: no node had it, 1: it is removed, 2: it is removed as far as can be told, and may come back from the
    // nodes in `unsure`.
    std::vector<uint8_t> flags;
    std::vector<std::string> unsure;  // empty: there are none for any key
};

struct GetItem {
    std::string_view name;
    std::span<const MemoryRef> parts;
};

// The bytes of all parts; UINT64_MAX when they are more than that.
inline uint64_t total(std::span<const MemoryRef> parts) {
    uint64_t bytes = 0;
    for (const MemoryRef& part : parts) {
        if (__builtin_add_overflow(bytes, part.bytes, &bytes)) return UINT64_MAX;
    }
    return bytes;
}

}  // namespace moonpool
