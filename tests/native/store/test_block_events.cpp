#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <map>
#include <set>

#include "../random.hpp"
#include "store/node/block_events.hpp"

namespace moonpool {
namespace {

using namespace std::string_literals;

const std::string kIdentity = "default\0default\0"s + std::string(32, 'f');

std::string name_of(uint64_t block, uint16_t range) {
    std::string name(42, '\0');
    std::memcpy(name.data(), &block, sizeof(block));
    std::memcpy(name.data() + 34, &range, sizeof(range));
    return name;
}

Hash128 hash_of(uint64_t block, uint16_t range) { return {block * 64 + range, 7}; }

uint64_t block_of(const BlockEvents::Row& row) {
    uint64_t block;
    std::memcpy(&block, row.digest.data(), sizeof(block));
    return block;
}

std::vector<BlockEvents::Row> taken(BlockEvents& events) {
    std::vector<BlockEvents::Row> rows;
    REQUIRE(events.take(rows));
    REQUIRE(events.check_integrity());
    return rows;
}

bool readable(const BlockEvents& events) {
    pollfd fd{events.event_fd(), POLLIN, 0};
    return ::poll(&fd, 1, 0) == 1;
}

TEST_CASE("block events: a block is there when all of its objects are, and gone with the first of them") {
    BlockEvents events;
    events.stored(kIdentity, hash_of(1, 0), name_of(1, 0));
    events.stored(kIdentity, hash_of(1, 1), name_of(1, 1));
    CHECK(readable(events));
    std::vector<BlockEvents::Row> rows = taken(events);
    REQUIRE(rows.size() == 3);  // too early, taken back, there
    CHECK(rows[0].stored == 1);
    CHECK(rows[1].stored == 0);
    CHECK(rows[2].stored == 1);
    CHECK_FALSE(readable(events));
    CHECK(events.fingerprints() == std::vector<std::string>{std::string(32, 'f')});

    events.stored(kIdentity, hash_of(2, 0), name_of(2, 0));
    CHECK(taken(events).empty());
    events.stored(kIdentity, hash_of(2, 1), name_of(2, 1));
    rows = taken(events);
    REQUIRE(rows.size() == 1);
    CHECK(block_of(rows[0]) == 2);
    CHECK(rows[0].on_disk == 0);

    events.on_disk(hash_of(2, 0));
    events.on_disk(hash_of(2, 1));
    events.removed(hash_of(2, 1), Tier::kDram);
    events.removed(hash_of(2, 0), Tier::kDram);
    rows = taken(events);
    REQUIRE(rows.size() == 2);
    CHECK((rows[0].on_disk == 1 && rows[0].stored == 1));
    CHECK((rows[1].on_disk == 0 && rows[1].stored == 0));
    events.removed(hash_of(2, 1), Tier::kSsd);
    events.removed(hash_of(2, 0), Tier::kSsd);
    CHECK(taken(events).size() == 1);
    CHECK(events.counters().blocks == 1);
}

TEST_CASE("block events: what is no block's is passed over") {
    BlockEvents events;
    events.stored(kIdentity, {1, 1}, "a name of a user");
    events.stored("default\0default\0"s, {1, 2}, name_of(1, 0));
    events.removed({9, 9}, Tier::kDram);
    events.on_disk({9, 9});
    CHECK(taken(events).empty());
    CHECK(events.counters().objects == 0);
    CHECK(events.counters().ignored_total == 1);
}

TEST_CASE("block events: more than is kept makes all due anew") {
    BlockEvents events;
    for (uint64_t block = 0; block <= BlockEvents::kRowsMax; ++block) {
        events.stored(kIdentity, hash_of(block, 0), name_of(block, 0));
    }
    std::vector<BlockEvents::Row> rows;
    CHECK(readable(events));
    CHECK_FALSE(events.take(rows));
    CHECK(rows.empty());
    std::set<uint64_t> there;
    uint32_t cursor = 0;
    do {
        events.inventory(cursor, rows);
        for (const BlockEvents::Row& row : rows) there.insert(block_of(row));
    } while (cursor != 0);
    CHECK(there.size() == BlockEvents::kRowsMax + 1);
    events.removed(hash_of(5, 0), Tier::kDram);
    CHECK(taken(events).size() == 1);
    CHECK(events.counters().overflows_total == 1);
}

TEST_CASE("block events: an inventory tells what is in memory, then what is on disks") {
    BlockEvents events;
    constexpr uint64_t kBlocks = 10'000;  // several pieces
    for (uint64_t block = 0; block < kBlocks; ++block) {
        events.stored(kIdentity, hash_of(block, 0), name_of(block, 0));
        if (block % 2 == 0) events.on_disk(hash_of(block, 0));
        if (block % 4 == 0) events.removed(hash_of(block, 0), Tier::kDram);
    }
    std::vector<BlockEvents::Row> rows, all;
    uint32_t cursor = 0, pieces = 0;
    do {
        events.inventory(cursor, rows);
        all.insert(all.end(), rows.begin(), rows.end());
        ++pieces;
    } while (cursor != 0);
    CHECK(pieces > 2);
    std::array<std::set<uint64_t>, 2> there;
    for (const BlockEvents::Row& row : all) CHECK(there[row.on_disk].insert(block_of(row)).second);
    CHECK(there[0].size() == kBlocks * 3 / 4);
    CHECK(there[1].size() == kBlocks / 2);
    CHECK(std::ranges::is_sorted(all, {}, &BlockEvents::Row::on_disk));
}

TEST_CASE("block events: random objects; what was told, applied in order, is what is there") {
    testing::Random random(51);
    BlockEvents events;
    constexpr uint64_t kBlocks = 40;
    constexpr uint16_t kRanges = 3;
    std::map<std::pair<uint64_t, uint16_t>, std::array<bool, 2>> model;
    std::set<uint16_t> ranges;
    std::set<std::pair<uint64_t, uint8_t>> told;
    for (int step = 0; step < 20000; ++step) {
        uint64_t block = random.below(kBlocks);
        auto range = static_cast<uint16_t>(random.below(step < 300 ? 1 + step / 100 : kRanges));
        std::array<bool, 2>& in = model[{block, range}];
        Hash128 hash = hash_of(block, range);
        switch (random.below(4)) {
            case 0:
            case 1:
                events.stored(kIdentity, hash, name_of(block, range));
                in[0] = true;
                ranges.insert(range);
                break;
            case 2: {
                bool disk = random.one_in(2);
                events.removed(hash, disk ? Tier::kSsd : Tier::kDram);
                in[disk ? 1 : 0] = false;
                break;
            }
            default:
                events.on_disk(hash);
                in[1] = in[0] || in[1];
        }
        if (step % 7 != 0) continue;
        for (const BlockEvents::Row& row : taken(events)) {
            std::pair<uint64_t, uint8_t> at{block_of(row), row.on_disk};
            REQUIRE(told.contains(at) == (row.stored == 0));
            row.stored != 0 ? (void)told.insert(at) : (void)told.erase(at);
        }
        std::set<std::pair<uint64_t, uint8_t>> there;
        std::vector<BlockEvents::Row> rows;
        uint32_t cursor = 0;
        events.inventory(cursor, rows);
        REQUIRE(cursor == 0);
        for (const BlockEvents::Row& row : rows) there.emplace(block_of(row), row.on_disk);
        REQUIRE(there == told);
        for (uint64_t b = 0; b < kBlocks; ++b) {
            for (uint8_t tier = 0; tier < 2; ++tier) {
                bool whole = !ranges.empty();
                for (uint16_t r : ranges) whole = whole && model[{b, r}][tier];
                REQUIRE(told.contains({b, tier}) == whole);
            }
        }
    }
    CHECK(!told.empty());
}

}  // namespace
}  // namespace moonpool
