#include <doctest/doctest.h>

#include <map>
#include <thread>

#include "../random.hpp"
#include "directory/delta_log.hpp"
#include "directory/drop_list.hpp"
#include "directory/removal_log.hpp"

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

TEST_CASE("removal log: the last removal of each key, in their order") {
    RemovalLog log(3);
    CHECK(log.covers(0));
    log.add(hash_of(1), 10);
    log.add(hash_of(2), 20);
    log.add(hash_of(1), 30);
    log.add(hash_of(1), 25);  // heard of late
    CHECK(log.find(hash_of(1)).version == 30);
    CHECK(log.size() == 2);
    std::vector<Version> after;
    log.each_after(20, [&](const Hash128&, const Removal& removal) {
        after.push_back(removal.version);
        return false;
    });
    CHECK(after == std::vector<Version>{30});
    log.add(hash_of(3), 40);
    log.add(hash_of(4), 50);  // pushes the oldest out, that of 2
    CHECK(log.find(hash_of(2)).version == kNoVersion);
    CHECK_FALSE(log.covers(19));
    CHECK(log.covers(20));
    log.add(hash_of(5), 15);  // of before: it is not complete there anyway
    CHECK(log.size() == 3);
    // A removal of a former master: compared by its version, and told at a place of its own.
    log.add(hash_of(6), 12, 60);
    CHECK(log.find(hash_of(6)).version == 12);
    CHECK(log.newest_place() == 60);
    CHECK(log.check_integrity());
    log.lose(60);
    CHECK(log.size() == 0);
    CHECK_FALSE(log.covers(59));
    CHECK(log.check_integrity());
}

TEST_CASE("removal log: never silent about a removal that it claims to cover") {
    testing::Random random(7);
    RemovalLog log(16);
    std::map<uint64_t, Version> last;
    for (Version version = 1; version < 5000; ++version) {
        uint64_t n = random.below(24);
        if (random.one_in(40)) log.lose(version - version / 3);
        last[n] = version;
        log.add(hash_of(n), version);
        for (auto [key, at] : last) {
            if (log.covers(at - 1)) REQUIRE(log.find(hash_of(key)).version == at);
        }
        REQUIRE(log.check_integrity());
    }
}

TEST_CASE("drop list: more than it holds become one, of all that is older than the last") {
    DropList drops(2);
    std::vector<uint64_t> told;
    auto tell = [&](const Drop& drop) { told.push_back(drop.version); };
    drops.push({hash_of(1), 10});
    drops.push({hash_of(2), 20});
    drops.confirm(1, tell);
    CHECK(told == std::vector<uint64_t>{10});
    drops.push({hash_of(3), 15});
    drops.push({hash_of(4), 18});
    CHECK(drops.all());
    CHECK(drops.all_before() == 20);
    CHECK(drops.items().empty());
    drops.confirm(2, tell);  // what a list said that is not there any more
    CHECK(drops.all());
    drops.push({hash_of(5), 30});
    drops.confirm(drops.first(), tell);
    CHECK_FALSE(drops.all());
    CHECK(drops.items().size() == 1);
    drops.confirm(drops.end(), tell);
    CHECK(drops.empty());
    CHECK(told == std::vector<uint64_t>{10, 30});
}

}  // namespace
}  // namespace moonpool
