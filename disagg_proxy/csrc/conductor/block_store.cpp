#include "conductor/block_store.hpp"

#include <algorithm>

namespace moonpool {

uint32_t BlockStore::find(const uint8_t* key, uint64_t hash) const {
    return table_.find(
        hash, [&](uint32_t row) { return std::memcmp(blocks_[row].digest.data(), key, kKeyBytes) == 0; });
}

uint32_t BlockStore::obtain(const uint8_t* key, const uint8_t* rest) {
    uint64_t h = hash(key);
    uint32_t block = find(key, h);
    if (block == kNoRow) {
        block = blocks_.take();
        std::memcpy(blocks_[block].digest.data(), key, kKeyBytes);
        table_.insert(h, block, [this](uint32_t row) { return hash_of(row); });
    }
    if (rest != nullptr) std::memcpy(blocks_[block].digest.data() + kKeyBytes, rest, 32 - kKeyBytes);
    return block;
}

HoldBits BlockStore::bits(uint32_t block, uint32_t holder) const {
    const Block& b = blocks_[block];
    if (b.crowd != kNoRow) return crowds_[b.crowd].bits(holder);
    for (uint16_t i = 0; i < b.count; ++i) {
        if (holder_of(b.pairs[i]) == holder) return bits_of(b.pairs[i]);
    }
    return 0;
}

void BlockStore::set_bits(uint32_t block, uint32_t holder, HoldBits bits) {
    Block& b = blocks_[block];
    bool was = this->bits(block, holder) != 0;
    if (!was && bits == 0) return;
    if (!was && b.crowd == kNoRow && b.count == kInlineHolders) join_crowd(b);
    if (b.crowd != kNoRow) {
        set_in_crowd(b, holder, bits);
    } else {
        auto end = b.pairs.begin() + b.count;
        auto at = std::find_if(b.pairs.begin(), end, [&](uint16_t p) { return holder_of(p) == holder; });
        *at = bits != 0 ? pair_of(holder, bits) : *(end - 1);
    }
    if (was && bits == 0) {
        --b.count;
        --holds_;
        if (b.crowd != kNoRow && b.count <= kLeaveCrowd) leave_crowd(b);
    } else if (!was) {
        ++b.count;
        ++holds_;
    }
}

HoldBits BlockStore::Crowd::bits(uint32_t holder) const {
    for (const Cell& cell : cells) {
        if (cell.word == holder / 64) return cell.bits(holder % 64);
    }
    return 0;
}

void BlockStore::Crowd::set(uint32_t holder, HoldBits bits) {
    uint32_t word = holder / 64;
    auto at = std::find_if(cells.begin(), cells.end(), [&](const Cell& cell) { return cell.word >= word; });
    if (at == cells.end() || at->word != word) {
        if (bits == 0) return;
        auto place = at - cells.begin();
        cells.reserve(cells.size() + 1);  // by one: there are many crowds, and they grow seldom
        at = cells.insert(cells.begin() + place, Cell{word, {}});
    }
    at->set(holder % 64, bits);
    if (at->anyone() == 0) cells.erase(at);
}

bool BlockStore::Crowd::check_integrity() const {
    for (size_t i = 0; i < cells.size(); ++i) {
        if (cells[i].anyone() == 0 || cells[i].word >= kHolderWords) return false;
        if (i > 0 && cells[i].word <= cells[i - 1].word) return false;
    }
    return true;
}

void BlockStore::set_in_crowd(const Block& b, uint32_t holder, HoldBits bits) {
    Crowd& crowd = crowds_[b.crowd];
    cells_bytes_ -= crowd.bytes();
    crowd.set(holder, bits);
    cells_bytes_ += crowd.bytes();
}

void BlockStore::join_crowd(Block& b) {
    b.crowd = crowds_.take();
    for (uint16_t i = 0; i < b.count; ++i) set_in_crowd(b, holder_of(b.pairs[i]), bits_of(b.pairs[i]));
}

void BlockStore::leave_crowd(Block& b) {
    const Crowd& crowd = crowds_[b.crowd];
    uint16_t n = 0;
    crowd.each([&](uint32_t holder, HoldBits bits) { b.pairs[n++] = pair_of(holder, bits); });
    cells_bytes_ -= crowd.bytes();
    crowds_.give(b.crowd);
    b.crowd = kNoRow;
}

void BlockStore::holders(uint32_t block, std::span<const uint32_t> words, HoldersByTier* out) const {
    const Block& b = blocks_[block];
    for (uint32_t word : words) out[word] = {};
    if (b.crowd != kNoRow) {
        const auto& cells = crowds_[b.crowd].cells;
        auto cell = cells.begin();
        for (uint32_t word : words) {
            while (cell != cells.end() && cell->word < word) ++cell;
            if (cell == cells.end()) return;
            if (cell->word == word) out[word] = cell->by_tier();
        }
        return;
    }
    for (uint16_t i = 0; i < b.count; ++i) {  // also into words that are not asked for
        uint32_t holder = holder_of(b.pairs[i]);
        uint64_t bit = uint64_t{1} << (holder % 64);
        HoldersByTier& word = out[holder / 64];
        HoldBits bits = bits_of(b.pairs[i]);
        word[2] |= bit;
        if ((bits & (kOnDevice | kExpected | kOnHost)) != 0) word[1] |= bit;
        if ((bits & (kOnDevice | kExpected)) != 0) word[0] |= bit;
    }
}

bool BlockStore::add_ref(uint32_t block) {
    uint16_t& refs = blocks_[block].refs;
    if (refs == UINT16_MAX) return false;
    ++refs;
    return true;
}

void BlockStore::release_unused(uint32_t block) {
    if (in_use(block)) return;
    table_.erase(hash_of(block), block, [this](uint32_t row) { return hash_of(row); });
    blocks_.give(block);
}

bool BlockStore::check_integrity() const {
    uint64_t holds = 0, crowds = 0, in_table = 0, cells_bytes = 0;
    for (uint32_t row = 0; row < blocks_.end(); ++row) {
        if (!in_use(row)) continue;
        const Block& b = blocks_[row];
        if (find(b.digest.data()) != row) return false;
        ++in_table;
        holds += b.count;
        uint16_t count = 0;
        bool sound = true;
        each_holder(row, [&](uint32_t holder, HoldBits held) {
            ++count;
            // "used" says nothing alone
            sound = sound && (held & (kTierBits | kExpected)) != 0 && bits(row, holder) == held;
        });
        if (!sound) return false;
        if (count != b.count) return false;
        if (b.crowd != kNoRow) {
            ++crowds;
            cells_bytes += crowds_[b.crowd].bytes();
            if (b.count <= kLeaveCrowd || !crowds_[b.crowd].check_integrity()) return false;
        }
    }
    return holds == holds_ && crowds == crowds_.used() && cells_bytes == cells_bytes_ &&
           in_table == blocks_.used() && table_.size() == blocks_.used();
}

}  // namespace moonpool
