#include <doctest/doctest.h>

#include "store/node/pool.hpp"
#include "store/shared/shared_index.hpp"

using namespace moonpool;

namespace {

IndexReader index_of(Pool& pool, const Incarnation& incarnation) {
    Result<Fd> fd = pool.table().index().read_only_fd();
    REQUIRE(fd);
    Result<IndexReader> index = IndexReader::open(fd->get(), pool.table().index().bytes(), incarnation);
    REQUIRE(index);
    return std::move(*index);
}

uint64_t told(Pool& pool, const Incarnation& incarnation) { return index_of(pool, incarnation).free_bytes(); }

}  // namespace

TEST_CASE("a pool whose memory is still being reserved is not full") {
    const Incarnation incarnation{};
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 1u << 30, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    Result<uint64_t> piece = pool.commit_memory();
    REQUIRE(piece);
    pool.open_memory();
    REQUIRE(pool.capacity() < pool.arena_bytes());
    CHECK(told(pool, incarnation) == pool.arena_bytes());

    std::optional<Extent> lease = pool.lease(1 << 20, 1 << 20);
    REQUIRE(lease);
    pool.publish_free_bytes();
    CHECK(told(pool, incarnation) == pool.arena_bytes() - lease->size);

    pool.memory_is_short();
    pool.publish_free_bytes();
    CHECK(told(pool, incarnation) == pool.free_bytes());
    CHECK(pool.check_integrity());
}

TEST_CASE("a pool tells how much of its memory will stay in the pages that it lies in") {
    const Incarnation incarnation{};
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 128u << 20, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    IndexReader index = index_of(pool, incarnation);
    REQUIRE(pool.commit_memory(40u << 20));
    CHECK(index.settled_bytes() == 0);
    // In huge pages so far; where the kernel makes none, all of it at once.
    while (uint64_t more = pool.collapse_memory()) {
        CHECK(more > 0);
        CHECK(index.settled_bytes() == pool.huge_bytes());
    }
    CHECK(index.settled_bytes() == pool.committed_bytes());
    CHECK(pool.committed_bytes() == 40u << 20);
}

TEST_CASE("a pool evicts nothing while some of its memory was never used") {
    const Incarnation incarnation{};
    constexpr uint64_t kObject = 1 << 20;
    constexpr uint32_t kObjects = 288;  // more than the first piece that a node reserves
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 320u << 20, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    REQUIRE(pool.commit_memory());
    pool.open_memory();
    uint32_t space = *pool.open_space("default", "", 8);
    for (uint32_t i = 0; i < kObjects; ++i) {
        std::string name = "k" + std::to_string(i);
        std::optional<Extent> lease = pool.lease(kObject, kObject);
        REQUIRE(lease);
        Extent extent{lease->offset, kObject};
        REQUIRE(pool.leases().commit(extent));
        REQUIRE(pool.table().commit(space, pool.hash(space, name), name, extent, 0, kNoSlot, false) ==
                ObjectTable::Commit::kStored);
        pool.leases().close(lease->offset);
    }
    CHECK(pool.table().counters().evicted_total == 0);
    CHECK(pool.table().counters().objects == kObjects);
    CHECK(pool.check_integrity());
}

TEST_CASE("a pool gives a space back when nobody uses it and no object is of it") {
    const Incarnation incarnation{};
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 4 << 20, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    constexpr uint32_t kMost = 8;
    for (int i = 0; i < 70'000; ++i) {
        std::optional<uint32_t> space = pool.open_space("session-" + std::to_string(i), "", kMost);
        REQUIRE(space);
        pool.leave_space(*space);
    }
    CHECK(pool.spaces() == 0);
    auto put = [&](uint32_t space) {
        REQUIRE(pool.table().commit(space, pool.hash(space, "k"), "k", {}, 0, kNoSlot, false) ==
                ObjectTable::Commit::kStored);
    };
    std::vector<uint32_t> spaces;
    for (uint32_t i = 0; i < kMost; ++i) {
        spaces.push_back(*pool.open_space("n", std::to_string(i), kMost));
        put(spaces.back());
        pool.leave_space(spaces.back());
    }
    CHECK_FALSE(pool.open_space("n", "one too many", kMost));
    CHECK(*pool.open_space("n", "3", kMost) == spaces[3]);  // what is in it is what was
    CHECK(pool.find(spaces[3], "k") != kNoSlot);
    // A reader keeps it, though its object was removed.
    uint32_t slot = pool.find(spaces[5], "k");
    uint64_t generation = pool.table().generation(slot);
    pool.table().pin(slot);
    pool.table().remove(slot);
    CHECK_FALSE(pool.open_space("n", "one too many", kMost));
    pool.table().unpin(slot, generation);
    std::optional<uint32_t> other = pool.open_space("n", "one too many", kMost);
    REQUIRE(other);
    CHECK(pool.find(*other, "k") == kNoSlot);
    CHECK(pool.identity(*other).ends_with("one too many"));
    CHECK(pool.check_integrity());
}

TEST_CASE(
    "a pool keeps many more small objects than its arena has pages, and counts what goes for their number") {
    const Incarnation incarnation{};
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 32u << 20, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    REQUIRE(pool.commit_memory());
    pool.open_memory();
    uint32_t space = *pool.open_space("default", "", 8);
    constexpr uint64_t kObject = 64;
    const uint32_t most = pool.table().objects_max();
    CHECK(most == (32u << 20) / 1024);
    std::optional<Extent> lease = pool.lease(1 << 20, 8 << 20);
    uint64_t at = 0;
    for (uint32_t i = 0; i < most + 100; ++i, at += kObject) {
        if (at + kObject > lease->size) {
            pool.leases().close(lease->offset);
            lease = pool.lease(1 << 20, 8 << 20);
            REQUIRE(lease);
            at = 0;
        }
        std::string name = "k" + std::to_string(i);
        Extent extent{lease->offset + at, kObject};
        REQUIRE(pool.leases().commit(extent));
        REQUIRE(pool.table().commit(space, pool.hash(space, name), name, extent, 0, kNoSlot, false) ==
                ObjectTable::Commit::kStored);
        if (i + 1 == most) CHECK(pool.table().counters().evicted_total == 0);
    }
    pool.leases().close(lease->offset);
    CHECK(pool.table().counters().objects == most);
    CHECK(pool.table().counters().evicted_for_slots_total == 100);
    CHECK(pool.check_integrity());
}
