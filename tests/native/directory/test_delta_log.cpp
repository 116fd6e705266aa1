#include <doctest/doctest.h>

#include <map>
#include <thread>

#include "../random.hpp"
#include "directory/delta_log.hpp"
#include "directory/tombstones.hpp"

namespace moonpool {
namespace {

Hash128 hash_of(uint64_t n) { return Hash128{n, ~n}; }

TEST_CASE("delta log: begins with an inventory, then tells rows in their order") {
    int woken = 0;
    DeltaLog log(10, [&] { ++woken; });
    std::vector<DeltaRow> rows;
    log.push(hash_of(1), Tier::kDram, true);
    CHECK_FALSE(log.take(rows));
    CHECK(woken == 0);
    log.begin_inventory();
    log.push(hash_of(2), Tier::kDram, true);
    log.push(hash_of(2), Tier::kSsd, false);
    CHECK(woken == 1);
    REQUIRE(log.take(rows));
    CHECK(rows == std::vector<DeltaRow>{{hash_of(2), Tier::kDram, true}, {hash_of(2), Tier::kSsd, false}});
    rows.clear();
    REQUIRE(log.take(rows));
    CHECK(rows.empty());
}

TEST_CASE("delta log: over its limit an inventory is due, and the reader is woken for it") {
    int woken = 0;
    DeltaLog log(3, [&] { ++woken; });
    log.begin_inventory();
    for (uint64_t n = 0; n < 10; ++n) log.push(hash_of(n), Tier::kDram, true);
    CHECK(woken == 2);
    CHECK(log.overflows() == 1);
    CHECK(log.size() == 0);
    std::vector<DeltaRow> rows;
    CHECK_FALSE(log.take(rows));
    log.begin_inventory();
    CHECK(log.take(rows));
    log.push(hash_of(1), Tier::kDram, true);
    log.pause();
    rows.clear();
    CHECK_FALSE(log.take(rows));
}

TEST_CASE("delta log: one thread pushes, another takes") {
    constexpr uint64_t kRows = 20000;
    DeltaLog log(kRows);
    log.begin_inventory();
    std::thread pusher([&] {
        for (uint64_t n = 0; n < kRows; ++n) log.push(hash_of(n), Tier::kDram, true);
    });
    uint64_t next = 0;
    std::vector<DeltaRow> rows;
    while (next < kRows) {
        rows.clear();
        REQUIRE(log.take(rows));
        for (const DeltaRow& row : rows) REQUIRE(row.hash == hash_of(next++));
        std::this_thread::yield();
    }
    pusher.join();
}

TEST_CASE("tombstones: what was forgotten since") {
    Tombstones stones(3);
    CHECK(stones.covers(0));
    stones.add(10, hash_of(1));
    stones.add(20, hash_of(2));
    stones.add(30, hash_of(1));
    CHECK(stones.has(hash_of(1), 30));
    CHECK_FALSE(stones.has(hash_of(2), 21));
    stones.add(40, hash_of(3));  // pushes the first entry of 1 out, which had a later one
    CHECK(stones.has(hash_of(1), 5));
    CHECK_FALSE(stones.covers(10));
    CHECK(stones.covers(11));
    CHECK(stones.check_integrity());
    stones.prune(40);
    CHECK(stones.size() == 1);
    CHECK(stones.covers(31));
    CHECK_FALSE(stones.covers(30));
    stones.prune(50);
    CHECK(stones.covers(41));  // nothing was removed later
    CHECK(stones.size() == 0);
    CHECK(stones.check_integrity());
}

TEST_CASE("tombstones: never silent about a removal that they claim to cover") {
    testing::Random random(7);
    Tombstones stones(16);
    std::map<uint64_t, uint64_t> last;
    for (uint64_t now = 1; now < 5000; ++now) {
        uint64_t n = random.below(12);
        if (random.one_in(40)) stones.prune(now - now / 3);
        last[n] = now;
        stones.add(now, hash_of(n));
        for (auto [key, ms] : last) {
            for (uint64_t since : {ms, ms - 1, now - now / 3}) {
                if (stones.covers(since) && ms >= since) REQUIRE(stones.has(hash_of(key), since));
                if (ms < since) REQUIRE_FALSE(stones.has(hash_of(key), since));
            }
        }
        REQUIRE(stones.check_integrity());
    }
}

}  // namespace
}  // namespace moonpool
