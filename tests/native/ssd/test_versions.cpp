// Versions of records, and headers of segments that fail once.
#include <atomic>
#include <map>

#include "bench_log.hpp"
#include "ssd/record.hpp"

using namespace moonpool;
using namespace moonpool::ssd;
using namespace moonpool::ssd::testing;
using moonpool::testing::Random;

namespace {

Outcome put_version(Log& log, const std::string& name, uint64_t number, uint64_t version) {
    std::vector<std::byte> bytes = content(number, 5'000);
    Call call;
    REQUIRE(log.write(key_of(log, name), "", {bytes}, crc32c(0, bytes.data(), bytes.size()), call.done(),
                      version));
    return call.wait();
}

bool holds(Log& log, const std::string& name, uint64_t number) {
    std::vector<std::byte> bytes;
    return get(log, name, bytes) == Outcome::kDone && bytes == content(number, 5'000);
}

// A process that was killed: nothing more is written, and all that was is there.
std::unique_ptr<Log> killed(std::unique_ptr<Log> log, const std::shared_ptr<FakeDisk>& disk,
                            bool lose_removals) {
    disk->kill();
    log.reset();
    disk->crash([](uint64_t) { return true; });
    for (uint64_t at = kSegmentsBegin; lose_removals && at + kBlockBytes <= disk->image.size();
         at += kBlockBytes) {
        std::byte* block = disk->image.data() + at;
        bool removals = std::memcmp(block, "MPR1", 4) == 0 && block[42] == std::byte{2};
        if (removals) std::memset(block, 0, kBlockBytes);
    }
    return must_open(small_log(disk));
}

}  // namespace

TEST_CASE("ssd versions: a record keeps the version that it was written with") {
    auto disk = fake_disk();
    constexpr uint64_t kVersion = uint64_t{7} << 32 | 3;
    auto log = must_open(small_log(disk));
    auto version = [&] {
        std::optional<Found> found = log->find(key_of(*log, "k"));
        REQUIRE(found);
        return found->version;
    };
    REQUIRE(put_version(*log, "k", 1, kVersion) == Outcome::kDone);
    CHECK(version() == kVersion);
    SUBCASE("when its segment is reclaimed") {
        for (uint64_t i = 0; counter(*log, "ssd_copied_total") == 0; ++i) {
            REQUIRE(i < 2000);
            REQUIRE(put(*log, "churn", content(i, 20'000)) == Outcome::kDone);
        }
    }
    SUBCASE("over a stop") {}
    SUBCASE("over a kill") {
        REQUIRE(sync(*log) == Outcome::kDone);
        log = killed(std::move(log), disk, false);
    }
    CHECK(version() == kVersion);
    log.reset();
    log = must_open(small_log(disk));
    CHECK(version() == kVersion);
    CHECK(put(*log, "k", content(2, 5'000)) == Outcome::kDone);
    CHECK(version() == 0);
}

TEST_CASE("ssd versions: a lower version never wins, though it was written later, and never comes back") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    REQUIRE(put_version(*log, "k", 5, 5) == Outcome::kDone);
    REQUIRE(put_version(*log, "k", 3, 3) == Outcome::kDone);
    REQUIRE(put_version(*log, "k", 4, 4) == Outcome::kDone);
    SUBCASE("the removal of the higher one is lost") {
        log = killed(std::move(log), disk, true);
        CHECK(log->check_integrity());
        CHECK(holds(*log, "k", 5));
        CHECK(log->remove(key_of(*log, "k")));
        REQUIRE(sync(*log) == Outcome::kDone);
        log = killed(std::move(log), disk, false);
        CHECK_FALSE(log->find(key_of(*log, "k")));
    }
    SUBCASE("the higher one was removed") {
        REQUIRE(sync(*log) == Outcome::kDone);
        log = killed(std::move(log), disk, false);
        CHECK(log->check_integrity());
        CHECK(holds(*log, "k", 4));
    }
}

TEST_CASE("ssd versions: remove_older takes what has a lower version, also what is being written") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    REQUIRE(put_version(*log, "k", 1, 6) == Outcome::kDone);
    Hash128 hash = key_of(*log, "k").hash;
    CHECK(log->remove_older(hash, 6));
    CHECK(log->remove_older(hash, 5));
    CHECK(log->has(hash));
    CHECK_FALSE(log->remove_older(hash, 7));
    CHECK_FALSE(log->has(hash));
    CHECK_FALSE(log->remove_older(hash, 1));
    for (uint64_t limit : {8, 9}) {
        disk->hold();
        std::vector<std::byte> bytes = content(2, 5'000);
        Call call;
        REQUIRE(log->write(key_of(*log, "k"), "", {bytes}, crc32c(0, bytes.data(), bytes.size()), call.done(),
                           8));
        CHECK(log->remove_older(hash, limit) == (limit == 8));
        disk->release();
        CHECK(call.wait() == (limit == 8 ? Outcome::kDone : Outcome::kMiss));
        CHECK(log->has(hash) == (limit == 8));
        log->remove(hash);
    }
    REQUIRE(sync(*log) == Outcome::kDone);
    log = killed(std::move(log), disk, false);
    CHECK_FALSE(log->has(hash));
}

TEST_CASE("ssd recovery: a header that fails once costs what waited for it, and nothing older") {
    for (bool stored : {false, true}) {
        for (bool kill : {false, true}) {
            CAPTURE(stored);
            CAPTURE(kill);
            auto disk = fake_disk();
            auto log = must_open(small_log(disk));
            REQUIRE(put(*log, "old", content(1, 50'000)) == Outcome::kDone);
            std::atomic<int> failed{0};
            disk->fail([&](bool write, uint64_t offset, size_t) {
                bool header = write && offset >= kSegmentsBegin && (offset - kSegmentsBegin) % kSegment == 0;
                disk->stores_failed = stored;
                return header && failed++ == 0 ? EIO : 0;
            });
            // Until the next segment has taken some.
            for (int i = 0; put(*log, "new", content(2, 60'000)) != Outcome::kDone || failed < 2; ++i)
                REQUIRE(i < 10);
            REQUIRE(sync(*log) == Outcome::kDone);
            disk->fail({});
            if (kill) {
                log = killed(std::move(log), disk, false);
            } else {
                log.reset();
                log = must_open(small_log(disk));
            }
            CHECK(counter(*log, "ssd_recovered_damaged_segments") == 0);
            CHECK(log->check_integrity());
            std::vector<std::byte> bytes;
            CHECK(get(*log, "old", bytes) == Outcome::kDone);
            CHECK(bytes == content(1, 50'000));
            CHECK(get(*log, "new", bytes) == Outcome::kDone);
            CHECK(bytes == content(2, 60'000));
        }
    }
}

TEST_CASE("ssd recovery: headers that fail now and then, and kills: all that was written last is there") {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        auto disk = fake_disk();
        std::map<std::string, uint64_t> last;
        auto log = must_open(small_log(disk, 24));
        for (uint64_t life = 0; life < 4; ++life) {
            CAPTURE(life);
            auto faults = std::make_shared<Random>(seed * 100 + life);
            disk->fail([faults, disk = disk.get()](bool write, uint64_t offset, size_t) {
                bool header = write && offset >= kSegmentsBegin && (offset - kSegmentsBegin) % kSegment == 0;
                disk->stores_failed = faults->one_in(2);
                return header && faults->one_in(4) ? EIO : 0;
            });
            for (uint64_t i = 0; i < 25; ++i) {
                std::string name = "k" + std::to_string(random.below(8));
                uint64_t number = random.next();
                Outcome outcome;
                while ((outcome = put(*log, name, content(number, 20'000))) == Outcome::kFailed)
                    last.erase(name);
                REQUIRE(outcome == Outcome::kDone);
                last[name] = number;
            }
            REQUIRE(sync(*log) == Outcome::kDone);
            disk->fail({});
            disk->kill();
            log.reset();
            disk->crash(random);
            log = must_open(small_log(disk, 24));
            CHECK(counter(*log, "ssd_recovered_damaged_segments") == 0);
            std::vector<std::byte> bytes;
            for (auto& [name, number] : last) {
                CAPTURE(name);
                CHECK(get(*log, name, bytes) == Outcome::kDone);
                CHECK(bytes == content(number, 20'000));
            }
        }
    }
}
