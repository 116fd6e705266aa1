// BlockEvents: what a node has of whole KV blocks, from what it has of objects, for its subscribers
// (docs/events.md). Until the first subscriber comes a node enters nothing, and pays an empty function's
// check.
//
// A block is several objects (docs/keys.md). How many is not told to a node: it is the number of different
// ranges that were seen in the block's space. A tier has a block when it has that many of its objects; when a
// further range is seen, blocks that were told too early are taken back.
//
// The node's loop calls the first part, any other thread the second. Rows that are not fetched are bounded:
// beyond kRowsMax everything is due anew.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/rows.hpp"
#include "base/sha256.hpp"
#include "base/xxh3.hpp"
#include "directory/types.hpp"

namespace moonpool {

class BlockEvents {
   public:
    // As subscribers get it, 40 bytes.
    struct Row {
        Digest digest;
        uint32_t space = 0;
        uint8_t on_disk = 0;
        uint8_t stored = 0;
        uint16_t zero = 0;
    };
    static_assert(sizeof(Row) == 40);
    struct Counters {
        uint64_t blocks = 0, objects = 0, ignored_total = 0, overflows_total = 0;
    };

    static constexpr size_t kRowsMax = 1u << 16;
    static constexpr size_t kObjectsMax = 16u << 20;
    static constexpr size_t kRangesMax = 4096;  // of a space

    BlockEvents();
    BlockEvents(const BlockEvents&) = delete;

    // identity: of the object's space, "tenant 0 namespace 0 fingerprint". Names that are no block's are
    // passed over.
    void stored(std::string_view identity, const Hash128& hash, std::string_view name);
    void removed(const Hash128& hash, Tier tier) { change(hash, tier, false); }
    void on_disk(const Hash128& hash) { change(hash, Tier::kSsd, true); }

    int event_fd() const { return wake_.get(); }  // readable when there are rows
    // False: everything is due anew, by inventory().
    bool take(std::vector<Row>& out);
    // A piece of what is there, from `cursor` on, which becomes 0 with the last: first all that is in memory,
    // then all that is on disks, so that few messages can tell it.
    void inventory(uint32_t& cursor, std::vector<Row>& out) const;
    std::vector<std::string> fingerprints() const;  // of each space by its number
    Counters counters() const;
    bool check_integrity() const;

   private:
    struct Block {
        Digest digest{};
        uint32_t space = kNoRow;
        std::array<uint16_t, 2> objects{};  // by tier
        std::array<bool, 2> told{};

        bool empty() const { return objects[0] == 0 && objects[1] == 0; }
        uint32_t next_free() const { return objects[0] | uint32_t{objects[1]} << 16; }
        void set_next_free(uint32_t row) {
            space = kNoRow;
            objects = {static_cast<uint16_t>(row), static_cast<uint16_t>(row >> 16)};
        }
    };
    struct Object {
        uint32_t block = kNoRow;
        std::array<bool, 2> in{};
    };
    static constexpr size_t kRangesBytes = 10;  // the end of a name, behind its digest
    using RangesName = std::array<char, kRangesBytes>;
    struct Space {
        std::string fingerprint;
        std::set<RangesName> ranges;  // a few: one for each object of a block
    };
    struct BlockId {
        Digest digest{};
        uint32_t space = kNoRow;
        friend bool operator==(const BlockId&, const BlockId&) = default;
    };
    // Of what is a hash already: its first bytes.
    struct HashOf {
        size_t operator()(const Hash128& hash) const { return hash.low; }
        size_t operator()(const BlockId& id) const {
            size_t first = 0;
            std::memcpy(&first, id.digest.data(), sizeof(first));
            return first ^ id.space;
        }
    };
    struct HashOfText {
        using is_transparent = void;
        size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };

    void change(const Hash128& hash, Tier tier, bool added) EXCLUDES(mutex_);
    void count(Object& object, size_t tier, bool added) REQUIRES(mutex_);
    void tell(Block& block, size_t tier) REQUIRES(mutex_);
    uint32_t space_of(std::string_view identity) REQUIRES(mutex_);
    uint32_t obtain(uint32_t space, const Digest& digest) REQUIRES(mutex_);
    void push(const Row& row) REQUIRES(mutex_);

    mutable Mutex mutex_;
    Fd wake_;
    std::unordered_map<std::string, uint32_t, HashOfText, std::equal_to<>> space_ids_ GUARDED_BY(mutex_);
    std::vector<Space> spaces_ GUARDED_BY(mutex_);
    Rows<Block, 1024> blocks_ GUARDED_BY(mutex_);
    std::unordered_map<BlockId, uint32_t, HashOf> block_ids_ GUARDED_BY(mutex_);  // -> row
    std::unordered_map<Hash128, Object, HashOf> objects_ GUARDED_BY(mutex_);
    std::vector<Row> rows_ GUARDED_BY(mutex_);
    bool all_due_ GUARDED_BY(mutex_) = false;
    Counters counters_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
