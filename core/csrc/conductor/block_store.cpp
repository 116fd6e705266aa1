#include "conductor/block_store.hpp"

#include <algorithm>

namespace moonpool {

namespace {

uint32_t holder_of(uint16_t pair) { return pair & 0xff; }
HoldBits bits_of(uint16_t pair) { return static_cast<HoldBits>(pair >> 8); }
uint16_t pair_of(uint32_t holder, HoldBits bits) { return static_cast<uint16_t>(bits << 8 | holder); }

}  // namespace

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
        crowds_[b.crowd].set(holder, bits);
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

void BlockStore::join_crowd(Block& b) {
    uint32_t row = crowds_.take();
    for (uint16_t i = 0; i < b.count; ++i) crowds_[row].set(holder_of(b.pairs[i]), bits_of(b.pairs[i]));
    b.crowd = row;
}

void BlockStore::leave_crowd(Block& b) {
    const Crowd& crowd = crowds_[b.crowd];
    uint16_t n = 0;
    for (uint32_t holder = 0; holder < kHoldersMax; ++holder) {
        if (HoldBits bits = crowd.bits(holder)) b.pairs[n++] = pair_of(holder, bits);
    }
    crowds_.give(b.crowd);
    b.crowd = kNoRow;
}

HoldersByTier BlockStore::holders(uint32_t block, uint32_t word) const {
    const Block& b = blocks_[block];
    if (b.crowd != kNoRow) {
        const auto& kinds = crowds_[b.crowd].kinds;
        uint64_t device = kinds[0].words[word] | kinds[3].words[word];
        uint64_t host = device | kinds[1].words[word];
        return {device, host, host | kinds[2].words[word]};
    }
    HoldersByTier out{};
    for (uint16_t i = 0; i < b.count; ++i) {
        uint32_t holder = holder_of(b.pairs[i]);
        if (holder / 64 != word) continue;
        uint64_t bit = uint64_t{1} << (holder % 64);
        HoldBits bits = bits_of(b.pairs[i]);
        out[2] |= bit;
        if ((bits & (kOnDevice | kExpected | kOnHost)) != 0) out[1] |= bit;
        if ((bits & (kOnDevice | kExpected)) != 0) out[0] |= bit;
    }
    return out;
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
    uint64_t holds = 0, crowds = 0, in_table = 0;
    for (uint32_t row = 0; row < blocks_.end(); ++row) {
        if (!in_use(row)) continue;
        const Block& b = blocks_[row];
        if (find(b.digest.data()) != row) return false;
        ++in_table;
        holds += b.count;
        uint16_t count = 0;
        for (uint32_t holder = 0; holder < kHoldersMax; ++holder) {
            HoldBits held = bits(row, holder);
            if (held == 0) continue;
            if ((held & (kTierBits | kExpected)) == 0) return false;  // "used" says nothing alone
            ++count;
        }
        if (count != b.count) return false;
        if (b.crowd != kNoRow) {
            ++crowds;
            if (b.count <= kLeaveCrowd) return false;
        }
    }
    return holds == holds_ && crowds == crowds_.used() && in_table == blocks_.used() &&
           table_.size() == blocks_.used();
}

}  // namespace moonpool
