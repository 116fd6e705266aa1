// BlockStore: the blocks of the prefix index, and the holders of each in each tier. Pure, no locks.
//
// A block is one cache line: its digest, and up to twelve holders with their bits. A block that more hold (a
// system prompt on a large fleet) gets a crowd: bit maps of 64 holders each, one for each kind of bit, and
// only where a holder is. So it costs at most 48 bytes a holder, and less than one where all 64 are there.
// A block lives while a holder has it or an entry of a holder's own table refers to it (refs).
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/rows.hpp"
#include "base/sha256.hpp"
#include "base/slot_table.hpp"

namespace moonpool {

inline constexpr uint32_t kHoldersMax = 2048;  // eleven bits of a pair
inline constexpr uint32_t kHolderWords = kHoldersMax / 64;
inline constexpr size_t kKeyBytes = 16;  // of a digest, its beginning: what callers name a block by
using BlockKey = std::array<uint8_t, kKeyBytes>;

// What a holder has of a block.
using HoldBits = uint8_t;
inline constexpr HoldBits kOnDevice = 1, kOnHost = 2, kOnDisk = 4, kExpected = 8, kUsed = 16;
inline constexpr HoldBits kTierBits = kOnDevice | kOnHost | kOnDisk;
inline constexpr size_t kHoldKinds = 5;

struct HolderMask {
    std::array<uint64_t, kHolderWords> words{};

    void set(uint32_t holder) { words[holder / 64] |= uint64_t{1} << (holder % 64); }
    void reset(uint32_t holder) { words[holder / 64] &= ~(uint64_t{1} << (holder % 64)); }
    bool test(uint32_t holder) const { return (words[holder / 64] >> (holder % 64) & 1) != 0; }
};

// 64 holders by how fast they have a block: on the device, there or in the host's memory, anywhere. What is
// expected to be computed counts as on the device.
using HoldersByTier = std::array<uint64_t, 3>;

class BlockStore {
   public:
    explicit BlockStore(uint64_t secret) : secret_(secret) {}

    static uint64_t hash(const uint8_t* key, uint64_t secret) {
        uint64_t first;
        std::memcpy(&first, key, sizeof(first));
        return mix64(first ^ secret);
    }
    uint64_t hash(const uint8_t* key) const { return hash(key, secret_); }
    void prefetch_slot(uint64_t hash) const { table_.prefetch(hash); }
    void prefetch_block(uint64_t hash) const {
        uint32_t block = table_.guess(hash);
        if (block != kNoRow) __builtin_prefetch(&blocks_[block]);
    }

    // kNoRow: not there.
    uint32_t find(const uint8_t* key) const { return find(key, hash(key)); }
    uint32_t find(const uint8_t* key, uint64_t hash) const;
    // The block of this digest, made when it is not there. With a key alone (rest == nullptr) the rest of the
    // digest stays as it was. A block without a holder must be given to release_unused() in the end.
    uint32_t obtain(const uint8_t* key, const uint8_t* rest);
    const Digest& digest(uint32_t block) const { return blocks_[block].digest; }

    HoldBits bits(uint32_t block, uint32_t holder) const;
    void set_bits(uint32_t block, uint32_t holder, HoldBits bits);  // 0: it no longer holds it
    // Its holders: of the words that are asked for (ascending), out[word] is that of holders 64 * word on.
    void holders(uint32_t block, std::span<const uint32_t> words, HoldersByTier* out) const;
    template <class Each>  // (holder, bits)
    void each_holder(uint32_t block, Each each) const {
        const Block& b = blocks_[block];
        if (b.crowd != kNoRow) return crowds_[b.crowd].each(each);
        for (uint16_t i = 0; i < b.count; ++i) each(holder_of(b.pairs[i]), bits_of(b.pairs[i]));
    }

    // False when the count is at its maximum.
    bool add_ref(uint32_t block);
    void drop_ref(uint32_t block) { --blocks_[block].refs; }
    void release_unused(uint32_t block);

    uint32_t blocks() const { return blocks_.used(); }
    uint64_t holds() const { return holds_; }  // pairs of a block and a holder
    size_t memory_bytes() const {
        return blocks_.memory_bytes() + crowds_.memory_bytes() + cells_bytes_ + table_.memory_bytes();
    }

    // For check_integrity of the whole index.
    uint32_t rows_end() const { return blocks_.end(); }
    bool in_use(uint32_t block) const { return blocks_[block].refs != 0 || blocks_[block].count != 0; }
    uint16_t refs(uint32_t block) const { return blocks_[block].refs; }
    bool check_integrity() const;

   private:
    static constexpr uint16_t kInlineHolders = 12;
    static constexpr uint16_t kLeaveCrowd = 6;  // so few holders stand in the block again

    struct alignas(64) Block {
        Digest digest{};
        uint32_t crowd = kNoRow;  // kNoRow: the holders stand in `pairs`
        uint16_t count = 0;       // of holders
        uint16_t refs = 0;
        std::array<uint16_t, kInlineHolders> pairs{};  // bits << 11 | holder

        uint32_t next_free() const { return crowd; }
        void set_next_free(uint32_t row) {
            *this = Block{};
            crowd = row;
        }
    };
    static_assert(sizeof(Block) == 64);

    // 64 holders, at least one of which has the block.
    struct Cell {
        uint32_t word = 0;
        std::array<uint64_t, kHoldKinds> kinds{};

        HoldBits bits(uint32_t bit) const {
            HoldBits out = 0;
            for (size_t k = 0; k < kHoldKinds; ++k) {
                out = static_cast<HoldBits>(out | (kinds[k] >> bit & 1) << k);
            }
            return out;
        }
        void set(uint32_t bit, HoldBits bits) {
            uint64_t mask = uint64_t{1} << bit;
            for (size_t k = 0; k < kHoldKinds; ++k) {
                kinds[k] = (bits >> k & 1) != 0 ? kinds[k] | mask : kinds[k] & ~mask;
            }
        }
        uint64_t anyone() const {
            uint64_t out = 0;
            for (uint64_t kind : kinds) out |= kind;
            return out;
        }
        HoldersByTier by_tier() const {
            uint64_t device = kinds[0] | kinds[3], host = device | kinds[1];
            return {device, host, host | kinds[2]};
        }
    };

    struct Crowd {
        std::vector<Cell> cells;  // by word; none is empty
        uint32_t next = kNoRow;

        HoldBits bits(uint32_t holder) const;
        void set(uint32_t holder, HoldBits bits);
        size_t bytes() const { return cells.capacity() * sizeof(Cell); }
        bool check_integrity() const;
        template <class Each>
        void each(Each each) const {
            for (const Cell& cell : cells) {
                for (uint64_t left = cell.anyone(); left != 0; left &= left - 1) {
                    auto bit = static_cast<uint32_t>(std::countr_zero(left));
                    each(cell.word * 64 + bit, cell.bits(bit));
                }
            }
        }
        uint32_t next_free() const { return next; }
        void set_next_free(uint32_t row) {
            *this = Crowd{};
            next = row;
        }
    };

    static uint32_t holder_of(uint16_t pair) { return pair & (kHoldersMax - 1); }
    static HoldBits bits_of(uint16_t pair) { return static_cast<HoldBits>(pair >> 11); }
    static uint16_t pair_of(uint32_t holder, HoldBits bits) {
        return static_cast<uint16_t>(bits << 11 | holder);
    }
    uint64_t hash_of(uint32_t block) const { return hash(blocks_[block].digest.data()); }
    void join_crowd(Block& b);
    void leave_crowd(Block& b);
    void set_in_crowd(const Block& b, uint32_t holder, HoldBits bits);

    uint64_t secret_;
    Rows<Block, 1024> blocks_;
    Rows<Crowd, 64> crowds_;
    SlotTable<8> table_;
    uint64_t holds_ = 0;
    size_t cells_bytes_ = 0;  // of all crowds
};

}  // namespace moonpool
