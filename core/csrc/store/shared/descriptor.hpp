// Where a pinned object lies: one row of a LOOKUP answer. It may be handed to another process of the same
// tenant, which reads the bytes from its own mapping while the pin holds.
#pragma once

#include <cstdint>

namespace moonpool {

struct Descriptor {
    uint64_t offset = 0;
    uint64_t size = 0;
    uint64_t generation = 0;  // 0: a miss
    uint32_t crc = 0;
    uint32_t slot = 0;
};
static_assert(sizeof(Descriptor) == 32);

// Set in the generation of what only an SSD of the node has: there is nothing to read at the offset yet.
inline constexpr uint64_t kOnSsd = 1ull << 63;
// Set in the cursor of a LIST that has come to the SSD.
inline constexpr uint32_t kListOnSsd = 1u << 31;

}  // namespace moonpool
