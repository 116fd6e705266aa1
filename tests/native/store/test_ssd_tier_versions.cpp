// SsdTier on the test's own loop: versions on their way to a disk and back, and what a directory that was
// away means.
#include <doctest/doctest.h>

#include <chrono>
#include <deque>
#include <thread>

#include "../ssd/fake_disk.hpp"
#include "base/clock.hpp"
#include "base/crc32c.hpp"
#include "store/node/ssd_tier.hpp"

using namespace moonpool;
using moonpool::ssd::testing::fake_disk;
using moonpool::ssd::testing::FakeDisk;

namespace {

class TierBed {
   public:
    explicit TierBed(std::vector<std::shared_ptr<FakeDisk>> disks) {
        Result<std::unique_ptr<Pool>> pool =
            Pool::create(PoolOptions{"default", 4 << 20, 0, 0}, Incarnation{});
        REQUIRE(pool);
        REQUIRE((*pool)->commit_memory());
        (*pool)->open_memory();
        pools_.emplace("default", std::move(*pool));
        SsdOptions options;
        for (size_t i = 0; i < disks.size(); ++i)
            options.directories.emplace_back(std::to_string(i), 65536 + (8 << 20));
        options.segment_bytes = 512 << 10;
        options.io = "threads";
        options.clean_share = 1.0;
        options.open = [disks](const std::string& path) {
            return disks[static_cast<size_t>(path[0] - '0')]->opener()(path);
        };
        auto post = [this](std::function<void()> f) {
            MutexLock lock(mutex_);
            posted_.push_back(std::move(f));
        };
        Result<std::unique_ptr<SsdTier>> opened = SsdTier::open(options, pools_, post);
        REQUIRE_MESSAGE(opened.ok(), opened.error().text);
        tier = std::move(*opened);
        space = *this->pool().open_space("", "", 100);
    }
    ~TierBed() { tier.reset(); }

    Pool& pool() { return *pools_.begin()->second; }
    Hash128 hash(std::string_view name) { return pool().hash(space, name); }

    void put(std::string_view name, char letter, Version version, bool replace = false) {
        auto lease = pool().lease(kBytes, kBytes);
        REQUIRE(lease);
        std::memset(pool().writable() + lease->offset, letter, kBytes);
        Extent extent{lease->offset, kBytes};
        REQUIRE(pool().leases().commit(extent));
        uint32_t crc = crc32c(0, pool().data() + lease->offset, kBytes);
        auto stored = pool().table().commit(space, hash(name), name, extent, crc, kNoSlot, replace,
                                            RetentionHints{}, version);
        REQUIRE(stored == ObjectTable::Commit::kStored);
        pool().leases().close(lease->offset);
    }
    void evict(std::string_view name) {
        uint32_t slot = pool().find(space, name);
        REQUIRE(slot != kNoSlot);
        pool().table().remove(slot);
    }
    bool promote(std::string_view name) {
        bool ended = false, there = false;
        if (!tier->promote(pool(), space, name, [&](uint32_t slot) {
                ended = true;
                there = slot != kNoSlot;
            })) {
            return false;
        }
        until([&] { return ended; });
        return there;
    }
    uint64_t gauge(std::string_view wanted) {
        for (auto& [name, value] : tier->gauges()) {
            if (name == wanted) return value;
        }
        FAIL("no gauge " << wanted);
        return 0;
    }
    template <class Condition>
    void until(Condition condition) {
        auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!condition()) {
            REQUIRE(std::chrono::steady_clock::now() < deadline);
            step();
        }
    }
    void step() {
        std::deque<std::function<void()>> now;
        {
            MutexLock lock(mutex_);
            now.swap(posted_);
        }
        for (auto& f : now) f();
        tier->on_tick(now_ms());
        std::this_thread::yield();
    }
    void written() {
        until([&] { return gauge("ssd_writing") == 0 && gauge("ssd_dirty_objects") == 0; });
    }
    // As a node that stops.
    void flush() {
        bool flushed = false;
        tier->flush([&] { flushed = true; });
        until([&] { return flushed; });
    }

    static constexpr uint64_t kBytes = 8192;
    SsdTier::Pools pools_;
    std::unique_ptr<SsdTier> tier;
    uint32_t space = 0;

   private:
    Mutex mutex_;
    std::deque<std::function<void()>> posted_ GUARDED_BY(mutex_);
};

}  // namespace

TEST_CASE("ssd tier: an object comes back from the disk with its version") {
    auto disk = fake_disk();
    for (bool again : {false, true}) {
        CAPTURE(again);
        TierBed bed({disk});
        if (!again) {
            bed.put("k", 'a', 77);
            bed.written();
            bed.evict("k");
        }
        CHECK(bed.tier->find(bed.pool(), bed.space, "k")->version == 77);
        REQUIRE(bed.promote("k"));
        CHECK(bed.pool().table().version(bed.pool().find(bed.space, "k")) == 77);
        bed.flush();
    }
}

TEST_CASE("ssd tier: forget_older takes older copies only, on the disk, being written and being read") {
    auto disk = fake_disk();
    TierBed bed({disk});
    bed.put("k", 'a', 7);
    bed.written();
    bed.evict("k");
    CHECK(bed.tier->forget_older(bed.hash("k"), 7));
    CHECK(bed.tier->holds(bed.pool(), bed.space, "k"));
    SUBCASE("on the disk") { CHECK_FALSE(bed.tier->forget_older(bed.hash("k"), 8)); }
    SUBCASE("being read") {
        disk->hold(true);
        bool ended = false, there = true;
        auto then = [&](uint32_t slot) {
            ended = true;
            there = slot != kNoSlot;
        };
        REQUIRE(bed.tier->promote(bed.pool(), bed.space, "k", then));
        CHECK_FALSE(bed.tier->forget_older(bed.hash("k"), 8));
        disk->release();
        bed.until([&] { return ended; });
        CHECK_FALSE(there);
        CHECK(bed.pool().find(bed.space, "k") == kNoSlot);
    }
    SUBCASE("being written") {
        bed.tier->forget(bed.hash("k"));
        disk->hold();
        bed.put("k", 'b', 8);
        bed.until([&] { return bed.gauge("ssd_writing") == 1; });
        bed.evict("k");
        CHECK(bed.tier->forget_older(bed.hash("k"), 8));
        CHECK_FALSE(bed.tier->forget_older(bed.hash("k"), 9));
        disk->release();
        bed.written();
    }
    CHECK_FALSE(bed.tier->holds(bed.pool(), bed.space, "k"));
}

TEST_CASE("ssd tier: a write in flight of a key that was evicted dies with the next commit of that key") {
    auto disk = fake_disk();
    TierBed bed({disk});
    disk->hold();
    bed.put("k", 'a', 0);
    bed.until([&] { return bed.gauge("ssd_writing") == 1; });
    bed.evict("k");
    bool replace = false;
    SUBCASE("without replace") {}
    SUBCASE("with replace") { replace = true; }
    bed.put("k", 'b', 0, replace);
    disk->release();
    bed.written();
    bed.evict("k");
    REQUIRE(bed.promote("k"));
    uint32_t slot = bed.pool().find(bed.space, "k");
    CHECK(bed.pool().data()[bed.pool().table().entry(slot).offset] == std::byte{'b'});
    CHECK(bed.tier->check_integrity());
}

TEST_CASE("ssd tier: of one key in two directories the higher version counts, and applied is the least") {
    auto one = fake_disk(), two = fake_disk();
    {
        TierBed bed({one, two});
        for (int i = 0; i < 20; ++i) bed.put("k" + std::to_string(i), 'a', 5);
        bed.written();
        bed.tier->set_applied(0, 5);
        bed.flush();
    }
    {
        TierBed bed({one});
        CHECK(bed.gauge("ssd_directories_away") == 1);
        CHECK(bed.tier->applied(0) == 5);
        for (int i = 0; i < 10; ++i) bed.put("k" + std::to_string(i), 'b', 6, true);
        for (int i = 10; i < 20; ++i) bed.tier->forget_older(bed.hash("k" + std::to_string(i)), 6);
        bed.tier->set_applied(0, 6);
        bed.flush();
        CHECK(bed.tier->applied(0) == 6);
    }
    TierBed bed({one, two});
    CHECK(bed.tier->applied(0) == 5);
    CHECK(bed.gauge("ssd_directories_away") == 0);
    for (int i = 0; i < 20; ++i) {
        CAPTURE(i);
        std::string name = "k" + std::to_string(i);
        auto found = bed.tier->find(bed.pool(), bed.space, name);
        CHECK(found.has_value() == (i < 10));
        if (found) CHECK(found->version == 6);
    }
}
