// What the directories of one node keep between the superblock and the first segment (docs/ssd.md): which
// belong together and when each was last there (SetBlock), and which keys changed while one was away
// (ChangeFilter). Pure: bytes in, values out. Everything that is read back is untrusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/xxh3.hpp"
#include "ssd/record.hpp"

namespace moonpool::ssd {

inline constexpr size_t kSetMembersMax = 16;
inline constexpr size_t kOrdersMax = 16;
inline constexpr uint64_t kAreaBegin = kBlockBytes;  // in the file
inline constexpr uint64_t kAreaBytes = kSegmentsBegin - kAreaBegin;
inline constexpr uint32_t kFilterBlock = 2;  // of the area; before it are two places for the SetBlock
inline constexpr uint32_t kFilterBlocks = static_cast<uint32_t>(kAreaBytes / kBlockBytes) - kFilterBlock;

// A time at which the set was opened. `id` is random: it tells two directories apart that were used the same
// number of times, each without the other.
struct Opening {
    uint64_t epoch = 0;  // how many there were before
    uint64_t id = 0;

    friend bool operator==(const Opening&, const Opening&) = default;
};

struct SetMember {
    enum class State : uint8_t {
        kThere,
        kAway,  // what changed since it was there is in the filter
        kGone,  // for too long: what it holds does not count
    };
    LogId id{};
    // What stands in its own block is one of the two: the last one that was to be written to it, and the one
    // before, as after a crash between the writes to two directories.
    Opening last, before;
    State state = State::kThere;

    bool was_at(const Opening& opening) const { return opening == last || opening == before; }
};

struct SetBlock {
    LogId set{};
    uint64_t revision = 0;  // of two blocks of one log the higher counts
    Opening opening;
    std::vector<uint64_t> applied{0};  // the caller's, one of each of its orders; docs/ssd.md
    uint64_t filter_life = 0;          // 0: no member is away
    std::vector<SetMember> members;
};
void encode_set_block(const LogId& log, const SetBlock& value, std::byte* block);
std::optional<SetBlock> decode_set_block(const LogId& log, std::span<const std::byte> block);
// The one that counts, of an area, and its place: 0 or 1.
std::optional<std::pair<SetBlock, uint32_t>> newest_set_block(const LogId& log,
                                                              std::span<const std::byte> area);

// A Bloom filter of the keys that were put, replaced or removed in a life of it. Each sector of the disk has
// its own checksum and life, and bits are only ever set: sectors of an earlier write, mixed with those of a
// later one, are the filter at a time in between.
class ChangeFilter {
   public:
    static constexpr uint32_t kSectorBytes = 512, kSectors = kFilterBlocks * (kBlockBytes / kSectorBytes);

    explicit ChangeFilter(uint64_t life);

    uint64_t life() const { return life_; }
    // Beyond that it says yes to most of what it is asked.
    bool is_full() const { return ones_ > kBits / 2; }
    bool may_contain(const Hash128& hash) const;
    // -> whether it is new to it.
    bool add(const Hash128& hash);
    void fill();

    // What was written of it. Sectors that no area has make it full.
    void unite(const LogId& log, std::span<const std::byte> area);
    void end_unite();

    bool dirty() const;
    // The blocks that changed since they were taken last; at first all.
    std::vector<uint32_t> take_dirty();
    void dirty_all() { dirty_.assign(kFilterBlocks, true); }
    std::vector<std::byte> block(const LogId& log, uint32_t block) const;

   private:
    static constexpr uint32_t kHeaderBytes = 16;
    static constexpr uint32_t kSectorBits = (kSectorBytes - kHeaderBytes) * 8;
    static constexpr uint64_t kBits = uint64_t{kSectors} * kSectorBits;
    static constexpr int kProbes = 4;

    static uint64_t place(const Hash128& hash, int probe) {
        return (hash.low + static_cast<uint64_t>(probe) * (hash.high | 1)) % kBits;
    }
    uint8_t& byte_of(uint64_t bit) { return bits_[bit / 8]; }

    uint64_t life_;
    uint64_t ones_ = 0;
    std::vector<uint8_t> bits_;
    std::vector<bool> known_;  // sectors, while it is united
    std::vector<bool> dirty_;  // blocks
};

}  // namespace moonpool::ssd
