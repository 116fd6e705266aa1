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

inline constexpr uint8_t kLookupPin = 1;
inline constexpr uint8_t kLookupPrefix = 2;
// Set in the number of hits: some that are there were not pinned, for pins hold their share of the arena.
inline constexpr uint32_t kLookupPinsRefused = 1u << 31;

inline constexpr uint8_t kCommitReplace = 1;
inline constexpr uint8_t kCommitMarks = 2;  // each row ends with its group and its soft pin

// What became of a name in REMOVE. A manifest is shown to whoever removed it: it knows its stripes.
inline constexpr uint8_t kNotRemoved = 0;
inline constexpr uint8_t kRemoved = 1;
inline constexpr uint8_t kRemovedManifest = 2;

enum class PutOutcome : uint8_t {
    kStored = 0,
    kExists = 1,
    kRefused = 2,
    kDamaged = 3,  // over TCP: the bytes that came do not match their checksum
};

// What a node can that those of the release before could not, as WELCOME says.
inline constexpr uint32_t kFeatureDescribe = 1;
inline constexpr uint32_t kFeatureMarks = 2;      // of COMMIT and PUT
inline constexpr uint32_t kFeatureRemoveOne = 4;  // REMOVE of one generation
inline constexpr uint32_t kFeatures = kFeatureDescribe | kFeatureMarks | kFeatureRemoveOne;

// A row of DESCRIBE's answer: one node's copy of an object.
struct Description {
    uint64_t size = 0;
    uint64_t generation = 0;  // with kOnSsd where only an SSD has it
    uint32_t crc = 0;
    uint32_t pins = 0;
    uint8_t where = 0;  // 0: it has none
    uint8_t keep = 0;   // in memory
    uint8_t zero[6] = {};
};
static_assert(sizeof(Description) == 32);
inline constexpr uint8_t kInMemory = 1;
inline constexpr uint8_t kInSsd = 2;
inline constexpr uint8_t kInGroup = 1;
inline constexpr uint8_t kSoftPinned = 2;

// How a row of READ names its object.
inline constexpr uint8_t kReadByName = 0;
inline constexpr uint8_t kReadPinned = 1;     // by slot and generation
inline constexpr uint8_t kReadPieceFlag = 2;  // a piece of it is enough

inline constexpr uint64_t kReadMiss = UINT64_MAX;
inline constexpr uint64_t kReadBytesMax = 1ull << 30;  // in one answer

}  // namespace moonpool
