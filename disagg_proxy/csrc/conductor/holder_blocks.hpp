// HolderBlocks: what one holder has, by its own names: its hash of a block -> the block, 13 bytes and a slot
// each. Here its removals and the parents of its new blocks are looked up, and here the hand of the clock
// goes round that finds its oldest unused entry when the index is full. Pure, no locks.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "base/rows.hpp"
#include "base/slot_table.hpp"

namespace moonpool {

class HolderBlocks {
   public:
    explicit HolderBlocks(uint64_t secret) : secret_(secret) {}

    uint32_t find(uint64_t name) const {
        return table_.find(hash(name), [&](uint32_t row) { return entries_[row].name == name; });
    }
    uint32_t insert(uint64_t name, uint32_t block) {
        uint32_t row = entries_.take();
        Entry& e = entries_[row];
        e.name = name;
        e.block = block;
        e.live = 1;
        table_.insert(hash(name), row, [this](uint32_t other) { return hash(entries_[other].name); });
        return row;
    }
    void erase(uint32_t row) {
        table_.erase(hash(entries_[row].name), row,
                     [this](uint32_t other) { return hash(entries_[other].name); });
        entries_.give(row);
    }

    uint32_t block(uint32_t row) const { return entries_[row].block; }
    bool live(uint32_t row) const { return entries_[row].live != 0; }

    // How many copies the device has: an engine may compute equal blocks at the same time and tells of each.
    void add_copy(uint32_t row) {
        if (entries_[row].copies < kCopiesMax) ++entries_[row].copies;
    }
    // Whether that was the last.
    bool drop_copy(uint32_t row) {
        Entry& e = entries_[row];
        if (e.copies > 0) --e.copies;
        return e.copies == 0;
    }

    uint32_t size() const { return entries_.used(); }
    uint32_t rows_end() const { return entries_.end(); }
    // The next entry for the hand; there must be one.
    uint32_t turn() {
        do {
            hand_ = hand_ + 1 < entries_.end() ? hand_ + 1 : 0;
        } while (!live(hand_));
        return hand_;
    }
    size_t memory_bytes() const { return entries_.memory_bytes() + table_.memory_bytes(); }
    bool check_integrity() const {
        uint32_t n = 0;
        for (uint32_t row = 0; row < entries_.end(); ++row) {
            if (!live(row)) continue;
            ++n;
            if (find(entries_[row].name) != row) return false;
        }
        return n == entries_.used() && n == table_.size();
    }

    std::unordered_map<uint32_t, double> expected;  // block -> until when, s: sent there, not yet confirmed
    int64_t group = kNoGroup;                       // of the KV cache groups, the one that is followed
    bool of_pool = false;                           // names are digests, and any engine may fetch from it
    bool leaving = false;                           // forget() is under way
    static constexpr int64_t kNoGroup = INT64_MIN;

   private:
    static constexpr uint8_t kCopiesMax = 127;
    struct __attribute__((packed)) Entry {
        uint64_t name = 0;
        uint32_t block = kNoRow;
        uint8_t copies : 7 = 0;
        uint8_t live : 1 = 0;

        uint32_t next_free() const { return block; }
        void set_next_free(uint32_t row) {
            live = 0;
            block = row;
        }
    };
    static_assert(sizeof(Entry) == 13);

    uint64_t hash(uint64_t name) const { return mix64(name ^ secret_); }

    uint64_t secret_;
    Rows<Entry, 512> entries_;
    SlotTable<4> table_;
    uint32_t hand_ = 0;
};

}  // namespace moonpool
