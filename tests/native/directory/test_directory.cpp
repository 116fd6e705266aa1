#include <doctest/doctest.h>

#include <map>
#include <set>
#include <tuple>

#include "../random.hpp"
#include "directory/directory.hpp"

namespace moonpool {
namespace {

using testing::Random;

// Well spread in both halves, as hashes are; few shards and many neighbours on demand.
Hash128 hash_of(uint64_t n) { return xxh3_128(&n, sizeof(n)); }
Hash128 crowded(uint64_t n) { return Hash128{n % 2, (n / 2 % 3) << 62 | n / 6 % 2}; }

std::vector<Holder> holders(const Directory& directory, const Hash128& hash) {
    std::vector<Holder> found;
    directory.find(hash, [&](Holder holder) { found.push_back(holder); });
    std::sort(found.begin(), found.end(),
              [](Holder a, Holder b) { return std::tuple(a.node, a.tier) < std::tuple(b.node, b.tier); });
    return found;
}

TEST_CASE("directory: several holders of a key, in several tiers") {
    Directory directory(1000);
    directory.open(1);
    directory.open(7);
    CHECK(directory.add(hash_of(1), 7, Tier::kSsd));
    CHECK(directory.add(hash_of(1), 1, Tier::kDram));
    CHECK(directory.add(hash_of(1), 7, Tier::kDram));
    CHECK(directory.add(hash_of(1), 7, Tier::kDram));  // told twice
    CHECK(holders(directory, hash_of(1)) ==
          std::vector<Holder>{{1, Tier::kDram}, {7, Tier::kDram}, {7, Tier::kSsd}});
    CHECK(directory.remove(hash_of(1), 7, Tier::kDram));
    CHECK_FALSE(directory.remove(hash_of(1), 7, Tier::kDram));
    CHECK(holders(directory, hash_of(1)) == std::vector<Holder>{{1, Tier::kDram}, {7, Tier::kSsd}});
    CHECK(holders(directory, hash_of(2)).empty());
    CHECK(directory.check_integrity());
}

TEST_CASE(
    "directory: a life that ends takes its rows with it at once, and its number is free after the sweep") {
    Directory directory(100000);
    directory.open(0);
    directory.open(1);
    for (uint64_t n = 0; n < 5000; ++n) {
        directory.add(hash_of(n), 0, Tier::kDram);
        directory.add(hash_of(n), 1, Tier::kDram);
    }
    directory.close(0);
    CHECK(holders(directory, hash_of(17)) == std::vector<Holder>{{1, Tier::kDram}});
    CHECK(directory.counters().rows == 5000);
    CHECK(directory.counters().void_rows == 5000);
    CHECK_FALSE(directory.is_free(0));
    CHECK_FALSE(directory.add(hash_of(1), 0, Tier::kDram));
    CHECK(directory.check_integrity());
    int steps = 1;
    while (directory.sweep()) ++steps;
    CHECK(steps <= static_cast<int>(kShards));
    CHECK(directory.is_free(0));
    CHECK(directory.counters().void_rows == 0);
    CHECK(directory.check_integrity());
    directory.open(0);
    CHECK(holders(directory, hash_of(17)) == std::vector<Holder>{{1, Tier::kDram}});
}

TEST_CASE("directory: after an inventory only what it told remains") {
    Directory directory(1000);
    directory.open(3);
    for (uint64_t n = 0; n < 10; ++n) directory.add(hash_of(n), 3, Tier::kDram);
    directory.begin_inventory(3);
    CHECK(holders(directory, hash_of(9)).size() == 1);  // still counts meanwhile
    for (uint64_t n = 0; n < 5; ++n) directory.add(hash_of(n), 3, Tier::kDram);
    directory.begin_inventory(3);  // starts over
    for (uint64_t n = 3; n < 8; ++n) directory.add(hash_of(n), 3, Tier::kDram);
    CHECK(holders(directory, hash_of(0)).size() == 1);
    CHECK(directory.check_integrity());
    directory.end_inventory(3);
    for (uint64_t n = 0; n < 10; ++n) {
        CHECK(holders(directory, hash_of(n)).size() == (n >= 3 && n < 8 ? 1 : 0));
    }
    CHECK(directory.rows(3, Tier::kDram) == 5);
    CHECK(directory.check_integrity());
}

TEST_CASE("directory: rounds come again without bringing void rows back") {
    Directory directory(1000);
    directory.open(3);
    directory.add(hash_of(1), 3, Tier::kDram);
    for (int i = 0; i < 1000; ++i) {
        directory.begin_inventory(3);
        if (i % 3 == 0) directory.end_inventory(3);
        if (i > 0) REQUIRE(holders(directory, hash_of(1)).empty());
        REQUIRE(directory.check_integrity());
    }
}

TEST_CASE("directory: memory per key, and given back") {
    constexpr uint64_t kKeys = 300000;
    Directory directory(kKeys);
    directory.open(0);
    for (uint64_t n = 0; n < kKeys; ++n) REQUIRE(directory.add(hash_of(n), 0, Tier::kDram));
    CHECK(directory.counters().table_bytes <= kKeys * 60);
    CHECK_FALSE(directory.add(hash_of(kKeys), 0, Tier::kDram));  // over rows_max
    CHECK(directory.counters().refused_total == 1);
    for (uint64_t n = 0; n < kKeys; ++n) {
        REQUIRE(directory.remove(hash_of(n), 0, Tier::kDram));
        if (n % 10000 == 0) CHECK(directory.counters().table_bytes <= kShards * 4096 + (kKeys - n) * 80);
    }
    CHECK(directory.counters().table_bytes == 0);
    CHECK(directory.check_integrity());
}

// Obviously correct: a set of (hash, node, tier) for each of "told in this inventory" and "told before".
class SlowDirectory {
   public:
    using Key = std::tuple<uint64_t, uint64_t, NodeId, Tier>;
    static Key key(const Hash128& h, NodeId n, Tier t) { return {h.low, h.high, n, t}; }

    std::set<NodeId> open, inventory;
    std::set<Key> now, before;

    void drop(std::set<Key>& rows, NodeId node) {
        std::erase_if(rows, [&](const Key& k) { return std::get<2>(k) == node; });
    }
    void begin(NodeId node) {
        inventory.insert(node);
        for (const Key& k : now) {
            if (std::get<2>(k) == node) before.insert(k);
        }
        drop(now, node);
    }
    std::vector<Holder> holders(const Hash128& hash) const {
        std::vector<Holder> found;
        for (NodeId node : open) {
            for (Tier tier : {Tier::kDram, Tier::kSsd}) {
                Key k = key(hash, node, tier);
                if (now.contains(k) || before.contains(k)) found.push_back({node, tier});
            }
        }
        return found;
    }
};

void compare_with_slow(Hash128 (*make)(uint64_t), uint64_t keys, int steps) {
    Random random(keys);
    Directory fast(1 << 20);
    SlowDirectory slow;
    for (int step = 0; step < steps; ++step) {
        auto node = static_cast<NodeId>(random.below(4));
        Hash128 hash = make(random.below(keys));
        auto tier = random.one_in(3) ? Tier::kSsd : Tier::kDram;
        auto k = SlowDirectory::key(hash, node, tier);
        bool open = slow.open.contains(node);
        switch (random.below(open ? 40 : 4)) {
            case 0:
                if (!open && fast.is_free(node)) {
                    fast.open(node);
                    slow.open.insert(node);
                } else if (open && random.one_in(10)) {
                    fast.close(node);
                    slow.open.erase(node);
                    slow.inventory.erase(node);
                    slow.drop(slow.now, node);
                    slow.drop(slow.before, node);
                }
                break;
            case 1:
                fast.sweep();
                break;
            case 2:
                if (open && random.one_in(4)) {
                    fast.begin_inventory(node);
                    slow.begin(node);
                }
                break;
            case 3:
                if (open && slow.inventory.erase(node) == 1) {
                    fast.end_inventory(node);
                    slow.drop(slow.before, node);
                }
                break;
            default:
                if (random.below(100) < (step / 2000 % 2 == 0 ? 65u : 35u)) {
                    CHECK(fast.add(hash, node, tier));
                    slow.now.insert(k);
                    slow.before.erase(k);
                } else {
                    bool was_there = slow.now.erase(k) + slow.before.erase(k) != 0;
                    CHECK(fast.remove(hash, node, tier) == was_there);
                }
        }
        REQUIRE(holders(fast, hash) == slow.holders(hash));
        if (step % 97 == 0) REQUIRE(fast.check_integrity());
    }
    for (uint64_t n = 0; n < keys; ++n) REQUIRE(holders(fast, make(n)) == slow.holders(make(n)));
    REQUIRE(fast.counters().rows == slow.now.size() + slow.before.size());
}

TEST_CASE("directory: agrees with a slow one, spread") { compare_with_slow(hash_of, 3000, 30000); }
TEST_CASE("directory: agrees with a slow one, crowded in one place") {
    compare_with_slow(crowded, 12, 20000);
}
TEST_CASE("directory: agrees with a slow one, one shard") {
    compare_with_slow([](uint64_t n) { return Hash128{kShards * 5, hash_of(n).high}; }, 900, 30000);
}

}  // namespace
}  // namespace moonpool
