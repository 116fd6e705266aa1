// A node that is told to drop all it holds, while objects are on their way between its memory and a disk.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "../ssd/fake_disk.hpp"
#include "base/clock.hpp"
#include "base/crc32c.hpp"
#include "store/node/node_member.hpp"

using namespace moonpool;
using moonpool::ssd::testing::fake_disk;
using moonpool::ssd::testing::FakeDisk;

namespace {

constexpr uint64_t kObject = 32 << 10;

// The test's own thread is the loop.
class Node {
   public:
    explicit Node(const std::shared_ptr<FakeDisk>& disk) : disk_(disk) {
        PoolOptions pool_options;
        pool_options.arena_bytes = 4 << 20;
        auto made = Pool::create(pool_options, Incarnation{});
        REQUIRE(made.ok());
        pools_["default"] = std::move(*made);
        for (;;) {
            Result<uint64_t> bytes = pool().commit_memory();
            REQUIRE(bytes.ok());
            if (*bytes == 0) break;
            pool().open_memory();
        }
        space_ = *pool().open_space("default", "", 8);
        SsdOptions options;
        options.directories = {{"/disk", 65536 + (16 << 20)}};
        options.segment_bytes = 512 << 10;
        options.io = "threads";
        options.depth = 4;
        options.clean_share = 1.0;
        options.open = disk->opener();
        auto opened = SsdTier::open(options, pools_, [this](std::function<void()> f) {
            std::lock_guard lock(mutex_);
            posted_.push_back(std::move(f));
        });
        REQUIRE_MESSAGE(opened.ok(), opened.error().text);
        ssd_ = std::move(*opened);
        member_ = std::make_unique<NodeMember>(ClusterOptions{}, "token", "", Incarnation{}, pools_,
                                               ssd_.get(), removals_, [this](const std::function<void()>& f) {
                                                   f();
                                                   if (after_piece) after_piece();
                                                   return true;
                                               });
    }
    ~Node() {
        disk_->release();
        ssd_->close();
        turn();
        member_.reset();
    }

    Pool& pool() { return *pools_["default"]; }
    SsdTier& ssd() { return *ssd_; }
    NodeMember& member() { return *member_; }
    std::function<void()> after_piece;  // of what the master asks for

    void put(const std::string& name) {
        std::optional<Extent> lease = pool().lease(kObject, kObject);
        REQUIRE(lease);
        std::memset(pool().writable() + lease->offset, 7, kObject);
        Extent extent{lease->offset, kObject};
        REQUIRE(pool().leases().commit(extent));
        uint32_t crc = crc32c(0, pool().data() + lease->offset, kObject);
        REQUIRE(pool().table().commit(space_, pool().hash(space_, name), name, extent, crc, kNoSlot, false) ==
                ObjectTable::Commit::kStored);
        pool().leases().close(lease->offset);
    }
    bool promote(const std::string& name, SsdTier::Then then) {
        return ssd_->promote(pool(), space_, name, std::move(then));
    }
    bool in_memory(const std::string& name) { return pool().find(space_, name) != kNoSlot; }
    bool on_ssd(const std::string& name) { return ssd_->holds(pool(), space_, name); }

    void turn() {
        for (;;) {
            std::function<void()> f;
            {
                std::lock_guard lock(mutex_);
                if (posted_.empty()) return;
                f = std::move(posted_.front());
                posted_.pop_front();
            }
            f();
        }
    }
    template <class Condition>
    void until(Condition condition) {
        auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!condition()) {
            REQUIRE(std::chrono::steady_clock::now() < deadline);
            turn();
            std::this_thread::yield();
        }
    }
    uint64_t gauge(const std::string& wanted) {
        for (auto& [name, value] : ssd_->gauges()) {
            if (name == wanted) return value;
        }
        FAIL("no gauge " << wanted);
        return 0;
    }

   private:
    std::shared_ptr<FakeDisk> disk_;
    SsdTier::Pools pools_;
    std::mutex mutex_;
    std::deque<std::function<void()>> posted_;
    std::unique_ptr<SsdTier> ssd_;
    Removals removals_;
    std::unique_ptr<NodeMember> member_;
    uint32_t space_ = 0;
};

const Drops kAll{true, UINT64_MAX, kNoVersion, 0, {}};

}  // namespace

TEST_CASE("node member: what is being written to a disk is dropped with the rest") {
    auto disk = fake_disk();
    Node node(disk);
    disk->hold();
    for (int i = 0; i < 8; ++i) node.put("k" + std::to_string(i));
    node.until([&] { return disk->waiting() != 0; });
    REQUIRE(node.member().drop(kAll));
    CHECK(node.pool().table().counters().objects == 0);
    disk->release();
    node.until([&] { return node.gauge("ssd_writes_waiting") == 0; });
    node.until([&] { return node.pool().table().counters().detached == 0; });
    for (int i = 0; i < 8; ++i) CHECK(!node.on_ssd("k" + std::to_string(i)));
    CHECK(node.gauge("ssd_objects") == 0);
    CHECK(node.pool().check_integrity());
}

TEST_CASE("node member: the master of one range has none but its own copies dropped") {
    auto disk = fake_disk();
    Node node(disk);
    std::vector<std::string> names[2];
    for (int i = 0; i < 8; ++i) {
        std::string name = "k" + std::to_string(i);
        names[range_of(node.pool().hash(0, name), 2)].push_back(name);
        node.put(name);
    }
    REQUIRE(!names[0].empty());
    REQUIRE(!names[1].empty());
    node.until([&] { return node.gauge("ssd_objects") == 8; });
    REQUIRE(node.member().drop(kAll, Range{1, 2}));
    for (const std::string& name : names[0]) CHECK((node.in_memory(name) && node.on_ssd(name)));
    for (const std::string& name : names[1]) CHECK((!node.in_memory(name) && !node.on_ssd(name)));
    CHECK(node.pool().check_integrity());
}

TEST_CASE("node member: what was applied of one range says nothing of another") {
    Removals removals(2);
    Hash128 keys[2] = {{.low = 0, .high = 1}, {.low = 1023, .high = 2}};
    std::vector<std::pair<uint32_t, Version>> told;
    removals.set_on_applied([&](uint32_t range, Version version) { told.emplace_back(range, version); });
    removals.set_applied(1, 50);
    removals.set_applied(1, 40);
    CHECK(told == std::vector<std::pair<uint32_t, Version>>{{1, 50}});
    CHECK(removals.of_put(keys[0], 10) == 10);
    CHECK(removals.of_put(keys[1], 10) == std::nullopt);
    CHECK(removals.newest_for(keys[1]) == 50);
    removals.add(keys[0], 20);
    removals.add(keys[1], 60);
    Version cursor = kNoVersion;
    std::vector<Drop> rows;
    removals.before(0, 100, cursor, 10, rows);
    CHECK(rows == std::vector<Drop>{{keys[0], 20}});
}

TEST_CASE("node member: what is being read from a disk is dropped with the rest") {
    auto disk = fake_disk();
    Node node(disk);
    node.put("k");
    node.until([&] { return node.gauge("ssd_objects") == 1 && node.gauge("ssd_saved_bytes") == kObject; });
    REQUIRE(node.pool().table().evict_one());
    disk->hold(true);
    bool ended = false;
    REQUIRE(node.promote("k", [&](uint32_t) { ended = true; }));
    node.after_piece = [&] {  // the read ends between two pieces
        disk->release();
        node.until([&] { return ended; });
    };
    REQUIRE(node.member().drop(kAll));
    CHECK(!node.in_memory("k"));
    CHECK(!node.on_ssd("k"));
    CHECK(node.pool().check_integrity());
}

TEST_CASE("node member: what is written and evicted while the rest is dropped goes too") {
    auto disk = fake_disk();
    Node node(disk);
    disk->hold();
    node.put("k");
    node.until([&] { return disk->waiting() != 0; });
    node.after_piece = [&] {  // after the first look at the disk
        node.after_piece = {};
        disk->release();
        node.until([&] { return node.gauge("ssd_saved_bytes") == kObject; });
        REQUIRE(node.pool().table().evict_one());
        REQUIRE(node.on_ssd("k"));
    };
    REQUIRE(node.member().drop(kAll));
    CHECK(!node.in_memory("k"));
    CHECK(!node.on_ssd("k"));
}

TEST_CASE("node member: the master is told of all that a directory held, when reading from it is given up") {
    auto disk = fake_disk();
    Node node(disk);
    constexpr uint64_t kObjects = 100;
    for (uint64_t i = 0; i < kObjects; ++i) node.put("k" + std::to_string(i));
    node.until([&] { return node.gauge("ssd_saved_bytes") == kObjects * kObject; });
    DeltaLog told(1000);
    told.begin_inventory();
    node.ssd().set_delta_log(&told);
    disk->fail([](bool write, uint64_t, size_t) { return write ? 0 : EIO; });
    for (int i = 0; i < 64; ++i) {
        bool ended = false;
        REQUIRE(node.promote("k" + std::to_string(i), [&](uint32_t) { ended = true; }));
        node.until([&] { return ended; });
    }
    CHECK(node.gauge("ssd_off") == 1);
    node.ssd().on_tick(now_ms());
    node.turn();
    std::vector<DeltaRow> rows;
    REQUIRE(told.take(rows));
    std::map<uint64_t, bool> there;  // as the master has it in the end
    for (const DeltaRow& row : rows) there[row.hash.low] = row.added;
    CHECK(there.size() == kObjects);
    CHECK(std::none_of(there.begin(), there.end(), [](auto& row) { return row.second; }));
    // The log's own thread may still be leaving the entry that was read last.
    node.until([&] {
        node.ssd().on_tick(now_ms());
        return node.gauge("ssd_objects") == 0;
    });
    CHECK(node.gauge("ssd_saved_bytes") == 0);  // what memory has is to be written again
    CHECK(node.pool().check_integrity());
    node.ssd().set_delta_log(nullptr);
}
