#include <doctest/doctest.h>
#include <sys/stat.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../random.hpp"
#include "store/node/memory_shares.hpp"
#include "store/shared/shared_index.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kObject = 256u << 10;

// Tenants of one node with a MemoryShares, as the server makes them, and what their clients do.
class Tenants {
   public:
    struct Given {
        std::string name;
        uint64_t bytes;
        TenantLimits limits;
    };

    explicit Tenants(const std::vector<Given>& given) {
        for (const Given& each : given) {
            PoolOptions options;
            options.tenant = each.name;
            options.arena_bytes = each.bytes;
            MemoryShares::apply(options, each.limits);
            auto made = Pool::create(options, Incarnation{});
            REQUIRE(made);
            pools_.push_back(std::move(*made));
            Pool& pool = *pools_.back();
            while (*pool.commit_memory() != 0) {
            }
            pool.open_memory();
            if (MemoryShares::limits_memory(each.limits)) shares.add(pool, each.bytes, each.limits);
            spaces_.push_back(*pool.open_space("default", "", 8));
        }
    }

    Pool& pool(size_t tenant) { return *pools_[tenant]; }

    // False: there was no memory for it.
    bool put(size_t tenant, int number, uint64_t bytes = kObject) {
        Pool& pool = this->pool(tenant);
        std::optional<Extent> lease = pool.lease(bytes, bytes);
        if (!lease) return false;
        std::string name = "k" + std::to_string(number);
        REQUIRE(pool.leases().commit({lease->offset, bytes}));
        REQUIRE(pool.table().commit(spaces_[tenant], pool.hash(spaces_[tenant], name), name,
                                    {lease->offset, bytes}, 0, kNoSlot,
                                    true) == ObjectTable::Commit::kStored);
        pool.leases().close(lease->offset);
        return true;
    }
    void put_many(size_t tenant, int n) {
        for (int i = 0; i < n; ++i) REQUIRE(put(tenant, i));
    }
    uint32_t slot(size_t tenant, int number) {
        return pool(tenant).find(spaces_[tenant], "k" + std::to_string(number));
    }
    int hits(size_t tenant, int n) {
        int found = 0;
        for (int i = 0; i < n; ++i) found += slot(tenant, i) != kNoSlot;
        return found;
    }
    uint64_t held() const {
        uint64_t all = 0;
        for (const auto& pool : pools_) all += pool->held_bytes();
        return all;
    }
    void ticks(int n) {
        for (int i = 0; i < n; ++i) shares.on_tick();
    }
    // What the kernel says that the arena's file has.
    uint64_t of_system(size_t tenant) {
        struct stat file {};
        REQUIRE(::fstat(pool(tenant).arena_fd(), &file) == 0);
        return static_cast<uint64_t>(file.st_blocks) * 512;
    }
    uint64_t settled(size_t tenant) {
        const IndexWriter& index = pool(tenant).table().index();
        Result<Fd> fd = index.read_only_fd();
        REQUIRE(fd);
        Result<IndexReader> reader = IndexReader::open(fd->get(), index.bytes(), Incarnation{});
        REQUIRE(reader);
        return reader->settled_bytes();
    }
    void check() {
        for (size_t i = 0; i < pools_.size(); ++i) {
            CHECK(pools_[i]->check_integrity());
            CHECK(of_system(i) == pools_[i]->held_bytes());
        }
    }

    MemoryShares shares;

   private:
    std::vector<std::unique_ptr<Pool>> pools_;
    std::vector<uint32_t> spaces_;
};

TenantLimits limits(std::optional<uint64_t> min, std::optional<uint64_t> max = {}) {
    return {.dram_min = min, .dram_max = max, .ssd_max = {}, .pins_max = {}, .bytes_per_s = {}};
}

}  // namespace

TEST_CASE("what limits mean") {
    auto bounds = [](const TenantLimits& given, uint64_t configured) {
        MemoryShares::Bounds b = MemoryShares::bounds(given, configured);
        return std::pair(b.min, b.max);
    };
    CHECK(bounds(limits({}), 8) == std::pair<uint64_t, uint64_t>{8, 8});
    CHECK(bounds(limits(2), 8) == std::pair<uint64_t, uint64_t>{2, 8});
    CHECK(bounds(limits(12), 8) == std::pair<uint64_t, uint64_t>{12, 12});
    CHECK(bounds(limits({}, 4), 8) == std::pair<uint64_t, uint64_t>{4, 4});
    CHECK(bounds(limits({}, 16), 8) == std::pair<uint64_t, uint64_t>{8, 16});
    CHECK(bounds(limits(2, 16), 8) == std::pair<uint64_t, uint64_t>{2, 16});
}

TEST_CASE("a tenant never holds more than its maximum, and evicts its own oldest content") {
    Tenants t({{"a", 16 * kMiB, limits({}, 8 * kMiB)}, {"b", 16 * kMiB, {}}});
    t.put_many(0, 64);
    CHECK(t.pool(0).held_bytes() == 8 * kMiB);
    CHECK(t.hits(0, 16) == 0);
    CHECK(t.slot(0, 63) != kNoSlot);
    CHECK(t.pool(1).held_bytes() == 16 * kMiB);
    t.check();
}

TEST_CASE("free memory above a minimum is lent without an eviction, and comes back when it is needed") {
    Tenants t({{"a", 16 * kMiB, limits(4 * kMiB)}, {"b", 16 * kMiB, limits(4 * kMiB, 64 * kMiB)}});
    t.put_many(0, 16);  // 4 MiB
    t.put_many(1, 88);  // 22 MiB
    CHECK(t.pool(0).table().counters().evicted_total == 0);
    CHECK(t.pool(1).held_bytes() >= 22 * kMiB);
    CHECK(t.hits(1, 88) == 88);
    CHECK(t.held() <= 32 * kMiB);
    t.check();
    // Until both are equally far above their minimums.
    t.put_many(0, 256);
    t.put_many(1, 256);
    for (size_t each : {0, 1}) {
        CHECK(t.pool(each).held_bytes() >= 15 * kMiB);
        CHECK(t.pool(each).held_bytes() <= 17 * kMiB);
    }
    CHECK(t.pool(1).share_counters().evicted > 0);
    // Neither takes what the other needs as well.
    auto moved = [&] {
        return t.pool(0).share_counters().taken_bytes + t.pool(1).share_counters().taken_bytes;
    };
    uint64_t before = moved();
    for (int i = 0; i < 256; ++i) {
        REQUIRE(t.put(0, i));
        REQUIRE(t.put(1, i));
    }
    CHECK(moved() - before <= 2 * kMiB);
    t.check();
}

TEST_CASE("a tenant gets its minimum from the one that is furthest above its own") {
    Tenants t({{"a", 24 * kMiB, limits(2 * kMiB)},
               {"b", 8 * kMiB, limits(2 * kMiB)},
               {"c", 2 * kMiB, limits(16 * kMiB)}});
    t.put_many(0, 96);
    t.put_many(1, 32);
    int of_b = t.hits(1, 32);
    t.put_many(2, 56);  // 14 MiB
    CHECK(t.hits(2, 56) == 56);
    CHECK(t.hits(1, 32) == of_b);
    CHECK(t.pool(2).table().counters().evicted_total == 0);
    CHECK(t.pool(0).share_counters().evicted > 0);
    CHECK(t.pool(1).share_counters().evicted == 0);
    // Of a minimum nothing goes, however much the others need.
    t.put_many(0, 400);
    t.put_many(1, 400);
    CHECK(t.hits(2, 56) == 56);
    t.check();
}

TEST_CASE("a tenant that lacks more than one other has above its minimum gets it from several") {
    Tenants t({{"a", 8 * kMiB, limits(6 * kMiB)},
               {"b", 8 * kMiB, limits(6 * kMiB)},
               {"c", 2 * kMiB, limits(6 * kMiB)}});
    t.put_many(0, 40);
    t.put_many(1, 40);
    CHECK(t.put(2, 0, kMiB));
    CHECK(t.put(2, 1, 4 * kMiB));
    for (size_t each : {0, 1, 2}) CHECK(t.pool(each).held_bytes() == 6 * kMiB);
    t.check();
}

TEST_CASE("what readers have pinned is not taken, and a put that finds nothing is refused") {
    Tenants t({{"a", 8 * kMiB, limits(0)}, {"b", 2 * kMiB, limits(8 * kMiB)}});
    t.put_many(0, 32);
    std::vector<uint32_t> pinned;
    for (int i = 0; i < 32; ++i) {
        if (uint32_t slot = t.slot(0, i); slot != kNoSlot) pinned.push_back(slot);
    }
    for (uint32_t slot : pinned) t.pool(0).table().pin(slot);
    CHECK(t.put(1, 0, kMiB));
    CHECK_FALSE(t.put(1, 1, 4 * kMiB));
    CHECK(t.pool(1).share_counters().refused == 1);
    CHECK(t.pool(0).share_counters().evicted == 0);
    for (uint32_t slot : pinned) t.pool(0).table().unpin(slot, t.pool(0).table().generation(slot));
    CHECK_FALSE(t.put(1, 1, 4 * kMiB));  // a tenant that could give nothing is left alone for a while
    t.ticks(30);
    CHECK(t.put(1, 1, 4 * kMiB));  // at one place, though memory comes in pieces
    t.check();
}

TEST_CASE("where pins lie in each piece nothing is evicted for memory that cannot come free") {
    constexpr uint64_t kSmall = 32u << 10;
    Tenants t({{"a", 16 * kMiB, limits(0)}, {"b", 2 * kMiB, limits(0, 16 * kMiB)}});
    for (int i = 0; i < 480; ++i) REQUIRE(t.put(0, i, kSmall));
    ObjectTable& table = t.pool(0).table();
    std::map<uint64_t, uint32_t> pinned;  // one in each grain
    for (int i = 0; i < 480; ++i) {
        uint32_t slot = t.slot(0, i);
        if (slot != kNoSlot) pinned.emplace(table.entry(slot).offset / t.pool(0).grain_bytes(), slot);
    }
    for (auto [grain, slot] : pinned) table.pin(slot);
    uint64_t before = table.counters().evicted_total, held = t.pool(0).held_bytes();
    REQUIRE(t.shares.set({{"a", limits({}, 2 * kMiB)}, {"b", limits(0, 16 * kMiB)}}));
    t.ticks(100);
    t.put_many(1, 64);
    CHECK(held - t.pool(0).held_bytes() <= 2 * kMiB);  // what no object had ever had
    CHECK(table.counters().evicted_total == before);
    for (auto [grain, slot] : pinned) table.unpin(slot, table.generation(slot));
    t.ticks(31);
    CHECK(t.pool(0).held_bytes() == 2 * kMiB);
    t.check();
}

TEST_CASE("memory that is given back costs about as many objects as it had") {
    testing::Random rng(3);
    Tenants t({{"a", 64 * kMiB, limits(0)}, {"b", 8 * kMiB, limits(0)}});  // in pieces of 2 MiB
    for (int i = 0; i < 4000; ++i) REQUIRE(t.put(0, i, 16u << 10));
    // Ages lie scattered: what was used the longest ago leaves small holes.
    ObjectTable& table = t.pool(0).table();
    for (int i = 0; i < 20000; ++i) {
        uint32_t slot = t.slot(0, static_cast<int>(rng.next() % 4000));
        if (slot == kNoSlot) continue;
        table.pin(slot);
        table.unpin(slot, table.generation(slot));
    }
    REQUIRE(t.shares.set({{"a", limits({}, 56 * kMiB)}, {"b", limits(0)}}));
    t.ticks(1);
    CHECK(t.pool(0).held_bytes() == 56 * kMiB);
    CHECK(t.pool(0).share_counters().evicted_bytes <= 8 * kMiB * 5 / 2);
    t.check();
}

TEST_CASE("one client leases at most half of what its tenant could have now") {
    Tenants t({{"a", 16 * kMiB, limits(12 * kMiB)}, {"b", 4 * kMiB, limits(4 * kMiB, 20 * kMiB)}});
    t.put_many(0, 64);
    t.ticks(1);  // that a lends 2 MiB, and no more
    CHECK(t.pool(1).arena_bytes() == 20 * kMiB);
    CHECK(t.pool(1).may_lease(kMiB, kMiB));
    CHECK_FALSE(t.pool(1).may_lease(kMiB, 6 * kMiB));
    CHECK(t.pool(1).may_lease(0, 5 * kMiB));
}

TEST_CASE("nothing is evicted for a need that others' memory does not meet") {
    Tenants t({{"a", 8 * kMiB, limits(7 * kMiB)}, {"b", 2 * kMiB, limits(2 * kMiB, 8 * kMiB)}});
    t.put_many(0, 32);
    uint64_t before = t.pool(0).table().counters().evicted_total;
    CHECK_FALSE(t.put(1, 0, 4 * kMiB));
    CHECK(t.pool(0).table().counters().evicted_total == before);
    CHECK(t.pool(0).held_bytes() == 8 * kMiB);
    t.check();
}

TEST_CASE("a need gets what others can give where the host has not what no tenant has") {
    Tenants t({{"a", 16 * kMiB, limits(2 * kMiB, 16 * kMiB)}, {"b", 4 * kMiB, limits(8 * kMiB, 24 * kMiB)}});
    REQUIRE(t.shares.set({{"a", limits(2 * kMiB, 8 * kMiB)}, {"b", limits(8 * kMiB, 24 * kMiB)}}));
    t.ticks(3);
    t.put_many(0, 40);
    REQUIRE(t.pool(0).held_bytes() == 8 * kMiB);
    uint64_t given = t.pool(0).share_counters().given_bytes, used = 0;
    t.pool(1).guard_commits([&](uint64_t bytes) {  // the host has what the other gave back, and no more
        if (used + bytes > t.pool(0).share_counters().given_bytes - given) return false;
        used += bytes;
        return true;
    });
    CHECK(t.put(1, 0, 3 * kMiB));
    CHECK(t.put(1, 1, 3 * kMiB));
    CHECK(t.hits(1, 2) == 2);
    t.check();
    t.pool(1).guard_commits({});
    t.ticks(31);  // what the host lacked is tried again
    t.put_many(1, 80);
    CHECK(t.pool(1).held_bytes() >= 8 * kMiB);
    t.check();
}

TEST_CASE("an object of more than 64 MiB gets the memory that is lent with its first put") {
    constexpr uint64_t kLarge = 88 * kMiB;
    Tenants t({{"a", 200 * kMiB, limits(0)}, {"b", 8 * kMiB, limits(0, 200 * kMiB)}});
    t.shares.set_get_ms(std::chrono::minutes(1));
    t.put_many(0, 800);
    REQUIRE(t.put(1, 0, kLarge));
    CHECK(t.slot(1, 0) != kNoSlot);
    CHECK(t.pool(1).held_bytes() >= kLarge);
    // Of it so much only as leaves the giver as far above its minimum.
    CHECK(t.pool(0).held_bytes() + 2 * kMiB >= t.pool(1).held_bytes());
    CHECK(t.pool(0).share_counters().evicted_bytes <= kLarge + 8 * kMiB);
    t.check();
    // One that does not come together evicts nothing.
    const uint64_t before = t.pool(0).table().counters().evicted_total;
    CHECK_FALSE(t.put(1, 1, 150 * kMiB));
    CHECK(t.pool(0).table().counters().evicted_total == before);
    t.check();
}

TEST_CASE("limits change while the node runs") {
    Tenants t({{"a", 16 * kMiB, limits(4 * kMiB)}, {"b", 16 * kMiB, limits(4 * kMiB, 24 * kMiB)}});
    t.put_many(0, 64);
    t.put_many(1, 64);
    auto set = [&](const TenantLimits& a, const TenantLimits& b) {
        return t.shares.set({{"a", a}, {"b", b}});
    };
    Result<std::vector<std::string>> later = set(limits({}, 4 * kMiB), limits(4 * kMiB, 24 * kMiB));
    REQUIRE(later);
    CHECK(later->empty());
    t.shares.on_tick();
    CHECK(t.pool(0).held_bytes() == 4 * kMiB);
    CHECK(t.hits(0, 64) > 0);
    t.put_many(1, 256);
    CHECK(t.pool(1).held_bytes() == 24 * kMiB);
    t.put_many(0, 64);
    CHECK(t.pool(0).held_bytes() == 4 * kMiB);
    t.check();

    CHECK_FALSE(set(limits(30 * kMiB), limits(4 * kMiB)));  // and nothing changes
    CHECK(t.shares.of(t.pool(0))->max == 4 * kMiB);
    later = set(limits(4 * kMiB), limits({}, 64 * kMiB));
    REQUIRE(later);
    CHECK(later->size() == 1);
    CHECK(later->front().find("dram_max of tenant b is above the 24.0 MiB") == 0);
}

TEST_CASE("memory that was given back does not come back by a stray read") {
    Tenants t({{"a", 8 * kMiB, limits({}, 4 * kMiB)}, {"b", 8 * kMiB, limits(0, 16 * kMiB)}});
    t.put_many(1, 48);
    CHECK(t.pool(1).held_bytes() == 12 * kMiB);
    uint64_t sum = 0;
    for (uint64_t at = 0; at < t.pool(1).arena_bytes(); at += 4096)
        sum += static_cast<uint64_t>(*(static_cast<const volatile std::byte*>(t.pool(1).data()) + at));
    CHECK(sum == 0);
    CHECK(t.of_system(1) == 16 * kMiB);
    t.shares.on_tick();
    t.shares.on_tick();
    t.check();
    CHECK(t.hits(1, 48) > 40);
}

TEST_CASE("a tenant without limits gives nothing and gets nothing") {
    Tenants t({{"a", 8 * kMiB, {}}, {"b", 8 * kMiB, limits(0, 32 * kMiB)}});
    t.put_many(1, 128);
    CHECK(t.pool(1).held_bytes() == 8 * kMiB);
    t.put_many(0, 128);
    CHECK(t.pool(0).held_bytes() == 8 * kMiB);
    CHECK(t.pool(0).share_counters().given_bytes == 0);
    t.check();
}

TEST_CASE("memory moves to and fro, and no byte is counted twice") {
    testing::Random rng(7);
    Tenants t({{"a", 80 * kMiB, limits(8 * kMiB, 120 * kMiB)},
               {"b", 16 * kMiB, limits(4 * kMiB, 90 * kMiB)},
               {"c", 8 * kMiB, limits(16 * kMiB, 30 * kMiB)}});
    for (size_t each : {0, 1, 2}) {
        while (t.pool(each).collapse_memory() != 0) {
        }
        CHECK(t.settled(each) == 0);  // so no card pins what may move
    }
    t.check();
    std::vector<std::pair<size_t, uint32_t>> pinned;
    for (int step = 0; step < 3000; ++step) {
        size_t tenant = rng.next() % 3;
        uint64_t bytes =
            (rng.next() % 40 == 0 ? 1 + rng.next() % 6 : 0) * kMiB + 4096 * (1 + rng.next() % 128);
        (void)t.put(tenant, static_cast<int>(rng.next() % 1000), bytes);
        if (uint32_t slot = t.slot(tenant, static_cast<int>(rng.next() % 1000));
            slot != kNoSlot && rng.next() % 8 == 0) {
            t.pool(tenant).table().pin(slot);
            pinned.emplace_back(tenant, slot);
        }
        if (pinned.size() > 20) {
            auto [of, slot] = pinned.front();
            t.pool(of).table().unpin(slot, t.pool(of).table().generation(slot));
            pinned.erase(pinned.begin());
        }
        if (step % 50 == 0) t.shares.on_tick();
        REQUIRE(t.held() <= 104 * kMiB);
        if (step % 300 == 0) t.check();
    }
    t.check();
    // Each still gets its minimum.
    for (auto [of, slot] : pinned) t.pool(of).table().unpin(slot, t.pool(of).table().generation(slot));
    for (size_t each : {2, 1, 0}) {
        t.put_many(each, 400);
        CHECK(t.pool(each).held_bytes() >= t.shares.of(t.pool(each))->min);
    }
}
