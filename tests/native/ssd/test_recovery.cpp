// Crashes at any write, against a model; and recovery of damaged images. Seeds are printed.
#include <deque>
#include <map>

#include "bench_log.hpp"

using namespace moonpool;
using namespace moonpool::ssd;
using namespace moonpool::ssd::testing;
using moonpool::testing::Random;

namespace {

uint64_t size_of(uint64_t version) { return version * 7919 % 40'000; }

// What may be found of a key after a crash: a version that was ever written, and none that a synced write or
// removal has made obsolete.
struct History {
    uint64_t last = 0;    // version of the last write
    uint64_t oldest = 1;  // no older one may be found
    uint64_t synced = 0;  // version that was there at the last sync; 0: none
    bool touched_since = false;
};

class Story {
   public:
    explicit Story(uint64_t salt) : random_(salt), disk_(fake_disk()), log_(must_open(small_log(disk_))) {}

    void life() {
        disk_->die(random_.between(1, 160));
        for (int step = 0; step < 400 && !disk_->dead(); ++step) {
            std::string name = "k" + std::to_string(random_.below(25));
            History& history = keys_[name];
            switch (random_.below(8)) {
                case 0: {
                    log_->remove(key_of(*log_, name));
                    history.touched_since = true;
                    removed_[name] = history.last;
                    break;
                }
                case 1: {
                    if (sync(*log_) == Outcome::kDone) remember_sync();
                    break;
                }
                case 2:
                case 3:
                    read(name);
                    break;
                default: {
                    ++history.last;
                    history.touched_since = true;
                    removed_.erase(name);
                    put(*log_, name, content(number(name, history.last), size_of(history.last)));
                }
            }
            if (random_.one_in(20)) CHECK(log_->check_integrity());
        }
    }

    void crash_and_check() {
        std::map<std::string, bool> in_memory;
        for (auto& [name, history] : keys_) in_memory[name] = log_->find(key_of(*log_, name)).has_value();
        log_.reset();
        disk_->crash(random_);
        log_ = must_open(small_log(disk_));
        CHECK(log_->check_integrity());
        for (auto& [name, history] : keys_) {
            CAPTURE(name);
            std::vector<std::byte> bytes;
            Outcome outcome = get(*log_, name, bytes);
            if (outcome == Outcome::kDone) {
                uint64_t version = version_of(name, bytes, history);
                CHECK(version >= history.oldest);
                CHECK(version <= history.last);
            } else {
                CHECK(outcome == Outcome::kMiss);
                // A start that finds too little room forgets the oldest.
                bool must_be_there = history.synced != 0 && !history.touched_since && in_memory[name] &&
                                     counter(*log_, "ssd_evicted_total") == 0;
                CHECK_FALSE(must_be_there);
            }
            if (!history.touched_since && history.synced == 0) CHECK(outcome == Outcome::kMiss);
            if (outcome == Outcome::kDone) history.last = history.oldest = version_of(name, bytes, history);
        }
        REQUIRE(sync(*log_) == Outcome::kDone);
        for (auto& [name, history] : keys_) {
            history.synced = log_->find(key_of(*log_, name)) ? history.last : 0;
            history.touched_since = false;
        }
        removed_.clear();
    }

   private:
    static uint64_t number(const std::string& name, uint64_t version) {
        return xxh3_64(name.data(), name.size()) + version;
    }

    uint64_t version_of(const std::string& name, const std::vector<std::byte>& bytes,
                        const History& history) {
        for (uint64_t version = history.last; version >= 1; --version) {
            if (bytes == content(number(name, version), size_of(version))) return version;
        }
        FAIL("bytes that were never written under " << name);
        return 0;
    }

    void read(const std::string& name) {
        std::vector<std::byte> bytes;
        if (get(*log_, name, bytes) != Outcome::kDone) return;
        CHECK(version_of(name, bytes, keys_[name]) >= keys_[name].oldest);
        CHECK_FALSE(removed_.contains(name));
    }

    void remember_sync() {
        for (auto& [name, history] : keys_) {
            bool there = log_->find(key_of(*log_, name)).has_value();
            history.synced = there ? history.last : 0;
            history.touched_since = false;
            if (there) history.oldest = history.last;
            if (auto it = removed_.find(name); it != removed_.end()) history.oldest = it->second + 1;
        }
    }

    Random random_;
    std::shared_ptr<FakeDisk> disk_;
    std::unique_ptr<Log> log_;
    std::map<std::string, History> keys_;
    std::map<std::string, uint64_t> removed_;
};

}  // namespace

TEST_CASE("ssd recovery: a crash at any write loses nothing that was synced and brings nothing back") {
    for (uint64_t salt = 0; salt < 12; ++salt) {
        CAPTURE(salt);
        Story story(salt);
        for (int life = 0; life < 5; ++life) {
            CAPTURE(life);
            story.life();
            story.crash_and_check();
        }
    }
}

TEST_CASE("ssd recovery: damaged images: no crash, and never bytes that were not written") {
    Random random(77);
    auto disk = fake_disk();
    constexpr uint64_t kObjects = 60;
    auto size = [](uint64_t i) { return i * 1237 % 30'000; };
    {
        auto log = must_open(small_log(disk));
        for (uint64_t i = 0; i < kObjects; ++i)
            REQUIRE(put(*log, "o" + std::to_string(i), content(i, size(i))) == Outcome::kDone);
        for (uint64_t i = 0; i < kObjects; i += 7) log->remove(key_of(*log, "o" + std::to_string(i)));
    }
    const std::vector<std::byte> sound = disk->image;
    uint64_t hits = 0;
    for (int round = 0; round < 150; ++round) {
        CAPTURE(round);
        disk->image = sound;
        uint64_t wounds = random.between(1, 6);
        for (uint64_t i = 0; i < wounds; ++i) {
            uint64_t blocks = disk->image.size() / kBlockBytes;
            // Rather where the format has something to say: headers, footers, superblock.
            uint64_t block = random.below(blocks);
            if (random.one_in(2)) {
                uint64_t per_segment = kSegment / kBlockBytes;
                block = 16 + random.below(12) * per_segment + (random.one_in(2) ? 0 : per_segment - 1);
            }
            std::byte* at = disk->image.data() + block * kBlockBytes;
            switch (random.below(4)) {
                case 0:
                    at[random.below(kBlockBytes)] ^= static_cast<std::byte>(1 << random.below(8));
                    break;
                case 1:
                    at[random.below(64)] = static_cast<std::byte>(random.next());
                    break;
                case 2:
                    std::memset(at, static_cast<int>(random.below(256)), kBlockBytes);
                    break;
                default:
                    std::memcpy(at, disk->image.data() + random.below(blocks) * kBlockBytes, kBlockBytes);
            }
        }
        Result<std::unique_ptr<Log>> log = Log::open(small_log(disk));
        if (!log) {
            CHECK_FALSE(log.error().text.empty());
            continue;
        }
        CHECK((*log)->check_integrity());
        std::vector<std::byte> bytes;
        for (uint64_t i = 0; i < kObjects; ++i) {
            if (get(**log, "o" + std::to_string(i), bytes) != Outcome::kDone) continue;
            ++hits;
            CHECK(bytes == content(i, size(i)));
        }
    }
    CHECK(hits > 500);
}

TEST_CASE(
    "ssd recovery: a segment that was lost takes what is older with it, since it may have held removals") {
    auto disk = fake_disk();
    {
        auto log = must_open(small_log(disk));
        REQUIRE(put(*log, "removed", content(1, 50'000)) == Outcome::kDone);
        REQUIRE(put(*log, "old", content(2, 50'000)) == Outcome::kDone);
        REQUIRE(put(*log, "second", content(3, 100'000)) == Outcome::kDone);  // the next segment
        log->remove(key_of(*log, "removed"));
        REQUIRE(sync(*log) == Outcome::kDone);
        REQUIRE(put(*log, "third", content(4, 100'000)) == Outcome::kDone);  // and the next
    }
    std::memset(disk->image.data() + 65536 + kSegment, 0, kSegment);
    auto log = must_open(small_log(disk));
    std::vector<std::byte> bytes;
    CHECK(get(*log, "removed", bytes) == Outcome::kMiss);
    CHECK(get(*log, "old", bytes) == Outcome::kMiss);
    CHECK(get(*log, "third", bytes) == Outcome::kDone);
}
