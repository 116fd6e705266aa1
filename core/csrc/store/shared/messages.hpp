// What the frames of the store hold (docs/wire.md has the byte tables), one struct for each part: written by
// one side, read by the other, so both stand here. A reader that ran short stays failed: its caller asks it
// once, at the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "memory/allocator.hpp"
#include "wire/frame.hpp"

namespace moonpool {

// ---- COMMIT and PUT: objects that become visible

inline constexpr uint8_t kCommitReplace = 1;
inline constexpr uint8_t kCommitMarks = 2;     // each row ends with its group and its soft pin
inline constexpr uint8_t kCommitVersions = 4;  // and with its version
inline constexpr uint8_t kCommitSizes = 8;     // the answer tells kExistsManifest from kExists

// An object's name, and what it belongs to.
struct NewKey {
    std::string_view name, parent;  // parent: empty: none
    std::string_view group = {};    // these two only with kCommitMarks
    uint32_t soft_ms = 0;
    std::optional<uint64_t> version{};  // with kCommitVersions: directory/version.hpp

    size_t bytes(uint8_t flags) const {
        return 4 + name.size() + parent.size() + ((flags & kCommitMarks) != 0 ? 6 + group.size() : 0) +
               ((flags & kCommitVersions) != 0 ? sizeof(uint64_t) : 0);
    }
    void write(Writer& w, uint8_t flags) const {
        w.text16(name);
        w.text16(parent);
        if ((flags & kCommitMarks) != 0) {
            w.text16(group);
            w.number(soft_ms);
        }
        if ((flags & kCommitVersions) != 0) w.number(version.value_or(0));
    }
    static NewKey read(Reader& r, uint8_t flags) {
        NewKey key;
        key.name = r.bytes16();
        key.parent = r.bytes16();
        if ((flags & kCommitMarks) != 0) {
            key.group = r.bytes16();
            key.soft_ms = r.number<uint32_t>();
        }
        if ((flags & kCommitVersions) != 0) key.version = r.number<uint64_t>();
        return key;
    }
    bool within(uint32_t key_bytes_max) const {
        return !name.empty() && name.size() <= key_bytes_max && group.size() <= key_bytes_max;
    }
};

struct CommitHead {
    uint32_t space = 0;
    uint8_t flags = 0;
    uint32_t rows = 0;

    bool replaces() const { return (flags & kCommitReplace) != 0; }
    void write(Writer& w) const {
        w.number(space);
        w.number(flags);
        w.number(uint8_t{0});
        w.number(uint16_t{0});
        w.number(rows);
    }
    static CommitHead read(Reader& r) {
        CommitHead head;
        head.space = r.number<uint32_t>();
        head.flags = r.number<uint8_t>();
        r.number<uint8_t>();
        r.number<uint16_t>();
        head.rows = r.number<uint32_t>();
        return head;
    }
};

// A row of COMMIT: the bytes are in leased memory.
struct CommitRow {
    Extent extent;
    uint32_t crc = 0;
    NewKey key;

    static size_t bytes(const NewKey& key, uint8_t flags) { return 20 + key.bytes(flags); }
    void write(Writer& w, uint8_t flags) const {
        w.number(extent.offset);
        w.number(extent.size);
        w.number(crc);
        key.write(w, flags);
    }
    static CommitRow read(Reader& r, uint8_t flags) {
        CommitRow row;
        row.extent.offset = r.number<uint64_t>();
        row.extent.size = r.number<uint64_t>();
        row.crc = r.number<uint32_t>();
        row.key = NewKey::read(r, flags);
        return row;
    }
};

// PUT begins as COMMIT does; its rows are followed by the bytes of all objects.
struct PutHead {
    static constexpr size_t kBytes = 16;
    CommitHead commit;
    uint32_t rows_bytes = 0;

    void write(Writer& w) const {
        commit.write(w);
        w.number(rows_bytes);
    }
    static PutHead read(Reader& r) {
        PutHead head;
        head.commit = CommitHead::read(r);
        head.rows_bytes = r.number<uint32_t>();
        return head;
    }
};

struct PutObject {
    uint64_t size = 0;
    uint32_t crc = 0;  // as the sender computed it
    NewKey key;

    static size_t bytes(const NewKey& key, uint8_t flags) { return 12 + key.bytes(flags); }
    void write(Writer& w, uint8_t flags) const {
        w.number(size);
        w.number(crc);
        key.write(w, flags);
    }
    static PutObject read(Reader& r, uint8_t flags) {
        PutObject object;
        object.size = r.number<uint64_t>();
        object.crc = r.number<uint32_t>();
        object.key = NewKey::read(r, flags);
        return object;
    }
};

// What their answers say of each row.
enum class PutOutcome : uint8_t {
    kStored = 0,
    kExists = 1,
    kRefused = 2,
    kDamaged = 3,         // over TCP: the bytes that came do not match their checksum
    kOlder = 4,           // than a removal or replacement; only of rows with a version
    kExistsManifest = 5,  // and has the size of a manifest; only with kCommitSizes
};

// Takes the size out of an outcome. True: the object that is there may be a manifest.
inline bool take_manifest_sized(PutOutcome& outcome) {
    if (outcome != PutOutcome::kExistsManifest) return false;
    outcome = PutOutcome::kExists;
    return true;
}

// Behind the outcomes of rows with versions: of each that is older, in the order of the rows, the version
// with which it comes after all that the node knows.

// Calls take(i, outcome, version) for each of n rows. False: the answer is of another number of them.
template <class Take>
bool read_outcomes(Reader& r, size_t n, Take take) {
    if (r.number<uint32_t>() != n) return false;
    std::string_view outcomes = r.bytes(n);
    for (size_t i = 0; i < outcomes.size(); ++i) {
        auto outcome = static_cast<PutOutcome>(outcomes[i]);
        take(i, outcome, outcome == PutOutcome::kOlder ? r.number<uint64_t>() : 0);
    }
    return r.done();
}

// ---- LOOKUP: exists, pin, longest prefix; then the names

inline constexpr uint8_t kLookupPin = 1;
inline constexpr uint8_t kLookupPrefix = 2;
// Set in the number of hits: some that are there were not pinned, for pins hold their share of the arena.
inline constexpr uint32_t kLookupPinsRefused = 1u << 31;

struct LookupHead {
    uint32_t space = 0;
    uint8_t flags = 0;
    uint16_t width = 1;
    uint32_t names = 0;

    bool pins() const { return (flags & kLookupPin) != 0; }
    bool prefix() const { return (flags & kLookupPrefix) != 0; }
    void write(Writer& w) const {
        w.number(space);
        w.number(flags);
        w.number(uint8_t{0});
        w.number(width);
        w.number(names);
    }
    static LookupHead read(Reader& r) {
        LookupHead head;
        head.space = r.number<uint32_t>();
        head.flags = r.number<uint8_t>();
        r.number<uint8_t>();
        head.width = std::max<uint16_t>(r.number<uint16_t>(), 1);
        head.names = r.number<uint32_t>();
        return head;
    }
};

// The answer, before a Descriptor for each name.
struct LookupFound {
    uint64_t pin_id = 0;  // 0: nothing is pinned
    uint32_t hits = 0;
    bool pins_refused = false;
    uint32_t descriptors = 0;

    void write(Writer& w) const {
        w.number(pin_id);
        w.number(hits | (pins_refused ? kLookupPinsRefused : 0));
        w.number(descriptors);
    }
    static LookupFound read(Reader& r) {
        LookupFound found;
        found.pin_id = r.number<uint64_t>();
        auto hits = r.number<uint32_t>();
        found.hits = hits & ~kLookupPinsRefused;
        found.pins_refused = (hits & kLookupPinsRefused) != 0;
        found.descriptors = r.number<uint32_t>();
        return found;
    }
};

// ---- READ, over TCP: u32 space, u32 n, and n of these

inline constexpr uint8_t kReadByName = 0;
inline constexpr uint8_t kReadPinned = 1;     // by slot and generation
inline constexpr uint8_t kReadPieceFlag = 2;  // a piece of it is enough

struct ReadAsk {
    static constexpr size_t kPinnedBytes = 29;
    uint8_t how = kReadByName;
    uint64_t from = 0, room = 0;  // bytes of the object
    std::string_view name = {};
    uint64_t generation = 0;  // or these two, with kReadPinned
    uint32_t slot = 0;

    static size_t named_bytes(std::string_view name) { return 19 + name.size(); }
    bool pinned() const { return (how & kReadPinned) != 0; }
    void write(Writer& w) const {
        w.number(how);
        w.number(from);
        w.number(room);
        if (!pinned()) return w.text16(name);
        w.number(generation);
        w.number(slot);
    }
    static ReadAsk read(Reader& r) {
        ReadAsk ask;
        ask.how = r.number<uint8_t>();
        ask.from = r.number<uint64_t>();
        ask.room = r.number<uint64_t>();
        if (!ask.pinned()) {
            ask.name = r.bytes16();
            return ask;
        }
        ask.generation = r.number<uint64_t>();
        ask.slot = r.number<uint32_t>();
        return ask;
    }
};

inline constexpr uint64_t kReadMiss = UINT64_MAX;
inline constexpr uint64_t kReadBytesMax = 1ull << 30;  // in one answer

// A row of its answer; the bytes of all follow.
struct ReadRow {
    uint64_t size = 0;   // kReadMiss: not here
    uint64_t bytes = 0;  // that follow
    uint64_t generation = 0;
    uint32_t crc = 0;  // of the whole object
    uint32_t slot = 0;
};
static_assert(sizeof(ReadRow) == 32);

// ---- REMOVE: u32 space, u32 n, n names, and of each the generation that alone is to go, or, with this bit
// in n, the version up to which copies go and a put of the key counts as older

inline constexpr uint32_t kRemoveVersions = 1u << 31;

// What became of a name. Its client is shown a removed manifest, which knows its stripes.

inline constexpr uint8_t kNotRemoved = 0;
inline constexpr uint8_t kRemoved = 1;
inline constexpr uint8_t kRemovedManifest = 2;

// ---- DESCRIBE: a row of its answer, one node's copy of an object

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

// ---- LIST: a row of its answer

struct ListedObject {
    uint64_t size = 0, generation = 0;
    uint32_t crc = 0, pins = 0;
    std::string_view name;

    void write(Writer& w) const {
        w.number(size);
        w.number(generation);
        w.number(crc);
        w.number(pins);
        w.text16(name);
    }
    static ListedObject read(Reader& r) {
        ListedObject row;
        row.size = r.number<uint64_t>();
        row.generation = r.number<uint64_t>();
        row.crc = r.number<uint32_t>();
        row.pins = r.number<uint32_t>();
        row.name = r.bytes16();
        return row;
    }
};

// ---- WELCOME: what a node can that those of the release before could not

inline constexpr uint32_t kFeatureDescribe = 1;
inline constexpr uint32_t kFeatureMarks = 2;      // of COMMIT and PUT
inline constexpr uint32_t kFeatureRemoveOne = 4;  // REMOVE of one generation
inline constexpr uint32_t kFeatureVersions = 8;   // of COMMIT, PUT and REMOVE
inline constexpr uint32_t kFeatureSizes = 16;     // of what exists, in the answers to COMMIT and PUT
inline constexpr uint32_t kFeatureRelay = 32;     // it passes questions of its host's processes to its master
inline constexpr uint32_t kFeatureReadOnly = 64;  // this connection's key may not put or remove
inline constexpr uint32_t kFeatureTenantKey = 128;  // it was opened by a tenant's key
// Of every node of this release; the relay is a setting, and what a key may do is its row's.
inline constexpr uint32_t kFeatures =
    kFeatureDescribe | kFeatureMarks | kFeatureRemoveOne | kFeatureVersions | kFeatureSizes;

}  // namespace moonpool
