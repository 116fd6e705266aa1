#include <doctest/doctest.h>

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
        auto holder = static_cast<uint32_t>(random.below(30) * 8);
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
            for (uint32_t h = 0; h < kHoldersMax; ++h) {
                auto at = model.find({b, h});
                HoldBits expected = at == model.end() ? HoldBits{0} : at->second;
                REQUIRE((row == kNoRow ? HoldBits{0} : store.bits(row, h)) == expected);
                if (row == kNoRow) continue;
                HoldersByTier by_tier = store.holders(row, h / 64);
                auto held = [&](size_t tier) { return (by_tier[tier] >> (h % 64) & 1) != 0; };
                REQUIRE(held(0) == ((expected & (kOnDevice | kExpected)) != 0));
                REQUIRE(held(1) == ((expected & (kOnDevice | kExpected | kOnHost)) != 0));
                REQUIRE(held(2) == (expected != 0));
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

}  // namespace
}  // namespace moonpool
