#include <doctest/doctest.h>

#include "store/pool.hpp"
#include "store/shared_index.hpp"

using namespace moonpool;

namespace {

uint64_t told(Pool& pool, const Incarnation& incarnation) {
    Result<Fd> fd = pool.table().index().read_only_fd();
    REQUIRE(fd);
    Result<IndexReader> index = IndexReader::open(fd->get(), pool.table().index().bytes(), incarnation);
    REQUIRE(index);
    return index->free_bytes();
}

}  // namespace

TEST_CASE("a pool whose memory is still being reserved is not full") {
    const Incarnation incarnation{};
    Result<std::unique_ptr<Pool>> made = Pool::create(PoolOptions{"default", 1u << 30, 0, 0}, incarnation);
    REQUIRE(made);
    Pool& pool = **made;
    Result<uint64_t> piece = pool.commit_memory();
    REQUIRE(piece);
    pool.open_memory(*piece);
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
