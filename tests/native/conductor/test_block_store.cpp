#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "../random.hpp"
#include "conductor/block_store.hpp"

namespace moonpool {
namespace {

BlockKey key_of(uint64_t n) {
    BlockKey key{};
    std::memcpy(key.data(), &n, sizeof(n));
    return key;
}

TEST_CASE("slot table: against a map, with hashes that collide") {
    testing::Random random(11);
    SlotTable<2> table;
    std::vector<uint64_t> hashes;  // by row
    std::map<uint32_t, bool> there;
    auto hash_of = [&](uint32_t row) { return hashes[row]; };
    for (uint32_t row = 0; row < 2000; ++row) {
        hashes.push_back(mix64(random.below(1500)) & (random.one_in(2) ? ~0ull : 0xc0000000000000ffull));
    }
    for (int step = 0; step < 20000; ++step) {
        auto row = static_cast<uint32_t>(random.below(hashes.size()));
        if (there[row]) {
            table.erase(hashes[row], row, hash_of);
        } else {
            table.insert(hashes[row], row, hash_of);
        }
        there[row] = !there[row];
        auto asked = static_cast<uint32_t>(random.below(hashes.size()));
        uint32_t found = table.find(hashes[asked], [&](uint32_t other) { return other == asked; });
        REQUIRE(found == (there[asked] ? asked : kNoRow));
    }
    size_t n = 0;
    for (auto& [row, is] : there) n += is ? 1 : 0;
    CHECK(table.size() == n);
}

TEST_CASE("block store: holders and their bits, against a map") {
    testing::Random random(12);
    BlockStore store(random.next());
    std::map<std::pair<uint64_t, uint32_t>, HoldBits> model;
    for (int step = 0; step < 30000; ++step) {
        uint64_t n = random.below(20);
        auto holder = static_cast<uint32_t>(random.below(30));
        holder = holder % 2 == 0 ? holder * 70 : kHoldersMax - 1 - holder;  // in many words, and in one
        HoldBits bits = random.one_in(3) ? HoldBits{0} : static_cast<HoldBits>(1u << random.below(4));
        if (bits != 0 && random.one_in(2)) bits |= kUsed;
        uint32_t block = store.obtain(key_of(n).data(), nullptr);
        store.set_bits(block, holder, bits);
        store.release_unused(block);
        if (bits == 0) {
            model.erase({n, holder});
        } else {
            model[{n, holder}] = bits;
        }
        if (step % 500 != 0) continue;
        REQUIRE(store.check_integrity());
        REQUIRE(store.holds() == model.size());
        for (uint64_t b = 0; b < 20; ++b) {
            uint32_t row = store.find(key_of(b).data());
            std::vector<uint32_t> words;  // that are asked for
            for (uint32_t w = 0; w < kHolderWords; ++w) {
                if (random.one_in(2)) words.push_back(w);
            }
            std::array<HoldersByTier, kHolderWords> held{};
            if (row != kNoRow) store.holders(row, words, held.data());
            for (uint32_t h = 0; h < kHoldersMax; ++h) {
                auto at = model.find({b, h});
                HoldBits expected = at == model.end() ? HoldBits{0} : at->second;
                REQUIRE((row == kNoRow ? HoldBits{0} : store.bits(row, h)) == expected);
                if (!std::binary_search(words.begin(), words.end(), h / 64)) continue;
                auto has = [&](size_t tier) { return (held[h / 64][tier] >> (h % 64) & 1) != 0; };
                REQUIRE(has(0) == ((expected & (kOnDevice | kExpected)) != 0));
                REQUIRE(has(1) == ((expected & (kOnDevice | kExpected | kOnHost)) != 0));
                REQUIRE(has(2) == (expected != 0));
            }
        }
    }
    for (auto& [at, bits] : model) {
        uint32_t block = store.find(key_of(at.first).data());
        store.set_bits(block, at.second, 0);
        store.release_unused(block);
    }
    CHECK(store.blocks() == 0);
    CHECK(store.check_integrity());
}

TEST_CASE("block store: a crowd costs no more than an entry, wherever its holders are") {
    for (uint32_t stride : {1u, 3u, 64u, 127u}) {
        BlockStore store(13);
        constexpr uint64_t kBlocks = 4096;
        size_t holders = std::min(64u, kHoldersMax / stride), alone = 0;
        for (uint64_t n = 0; n < kBlocks; ++n) {
            uint32_t block = store.obtain(key_of(n).data(), nullptr);
            for (uint32_t h = 0; h < 12; ++h) store.set_bits(block, h * stride, kOnDevice);
        }
        alone = store.memory_bytes();
        for (uint64_t n = 0; n < kBlocks; ++n) {
            uint32_t block = store.find(key_of(n).data());
            for (uint32_t h = 12; h < holders; ++h) store.set_bits(block, h * stride, kOnDevice);
        }
        CHECK((store.memory_bytes() - alone) / kBlocks <= holders * 56);
        for (uint64_t n = 0; n < kBlocks; ++n) {  // and is given back
            uint32_t block = store.find(key_of(n).data());
            for (uint32_t h = 3; h < holders; ++h) store.set_bits(block, h * stride, 0);
        }
        CHECK((store.memory_bytes() - alone) / kBlocks <= 64);
        CHECK(store.check_integrity());
    }
}

}  // namespace
}  // namespace moonpool
