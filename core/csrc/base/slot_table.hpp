// SlotTable: finds the number of a row by its hash. Open addressing, 4 bytes a slot: 8 bits of the hash, so
// that a stranger's row is hardly ever looked at, and 24 bits of row number. It is cut into segments that
// grow one at a time, so that no insert moves more than a small part of the whole.
//
// Rows stand elsewhere: the caller says whether a row is the one that is looked for, and gives a row's hash
// again when it must move. Hashes are to be mixed (mix64 with a secret), as strangers choose what is hashed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool {

inline constexpr uint32_t kNoRow = UINT32_MAX;
inline constexpr uint32_t kRowsMax = (1u << 24) - 2;

// murmur3's finaliser: every bit of the input changes half of the output's.
inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

template <unsigned kSegmentBits>
class SlotTable {
   public:
    template <class IsRow>
    uint32_t find(uint64_t hash, IsRow is_row) const {
        const Segment& s = segment(hash);
        if (s.slots.empty()) return kNoRow;
        for (size_t at = home(s, hash);; at = next(s, at)) {
            uint32_t slot = s.slots[at];
            if (slot == 0) return kNoRow;
            if (slot >> 24 == tag(hash) && is_row(row(slot))) return row(slot);
        }
    }

    // The row that is likely meant, for a prefetch; kNoRow: probably none.
    uint32_t guess(uint64_t hash) const {
        const Segment& s = segment(hash);
        if (s.slots.empty()) return kNoRow;
        uint32_t slot = s.slots[home(s, hash)];
        return slot == 0 ? kNoRow : row(slot);
    }
    void prefetch(uint64_t hash) const {
        const Segment& s = segment(hash);
        if (!s.slots.empty()) __builtin_prefetch(&s.slots[home(s, hash)]);
    }

    // The row must not be in it yet, and is below kRowsMax.
    template <class HashOf>
    void insert(uint64_t hash, uint32_t row_number, HashOf hash_of) {
        Segment& s = segment(hash);
        if ((s.used + 1) * 4 > s.slots.size() * 3) grow(s, hash_of);
        put(s, hash, row_number);
        ++s.used;
    }

    // The row must be in it. Those behind it move up, so that no probe ends early.
    template <class HashOf>
    void erase(uint64_t hash, uint32_t row_number, HashOf hash_of) {
        Segment& s = segment(hash);
        size_t hole = home(s, hash);
        while (s.slots[hole] == 0 || row(s.slots[hole]) != row_number) hole = next(s, hole);
        for (size_t at = next(s, hole); s.slots[at] != 0; at = next(s, at)) {
            size_t wanted = home(s, hash_of(row(s.slots[at])));
            size_t mask = s.slots.size() - 1;
            if (((at - wanted) & mask) < ((at - hole) & mask)) continue;  // it would stand before its home
            s.slots[hole] = s.slots[at];
            hole = at;
        }
        s.slots[hole] = 0;
        --s.used;
    }

    void clear() { segments_ = {}; }

    size_t size() const {
        size_t n = 0;
        for (const Segment& s : segments_) n += s.used;
        return n;
    }
    size_t memory_bytes() const {
        size_t n = sizeof(*this);
        for (const Segment& s : segments_) n += s.slots.capacity() * sizeof(uint32_t);
        return n;
    }

   private:
    struct Segment {
        std::vector<uint32_t> slots;  // 0: empty, else tag << 24 | row + 1
        size_t used = 0;
    };
    static constexpr size_t kSegments = size_t{1} << kSegmentBits;
    static constexpr size_t kSlotsMin = 8;

    static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) & 0xff; }
    static uint32_t row(uint32_t slot) { return (slot & 0xffffff) - 1; }
    static size_t home(const Segment& s, uint64_t hash) {
        return static_cast<size_t>(hash & 0xffffffff) & (s.slots.size() - 1);
    }
    static size_t next(const Segment& s, size_t at) { return (at + 1) & (s.slots.size() - 1); }
    static void put(Segment& s, uint64_t hash, uint32_t row_number) {
        size_t at = home(s, hash);
        while (s.slots[at] != 0) at = next(s, at);
        s.slots[at] = tag(hash) << 24 | (row_number + 1);
    }
    template <class HashOf>
    static void grow(Segment& s, HashOf hash_of) {
        std::vector<uint32_t> old(s.slots.empty() ? kSlotsMin : 2 * s.slots.size());
        old.swap(s.slots);
        for (uint32_t slot : old) {
            if (slot != 0) put(s, hash_of(row(slot)), row(slot));
        }
    }

    const Segment& segment(uint64_t hash) const { return segments_[hash >> (64 - kSegmentBits)]; }
    Segment& segment(uint64_t hash) { return segments_[hash >> (64 - kSegmentBits)]; }

    std::array<Segment, kSegments> segments_;
};

}  // namespace moonpool
