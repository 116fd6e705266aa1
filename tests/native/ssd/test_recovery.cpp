// Crashes at any write, against a model; and recovery of damaged images. Seeds are printed.
#include <atomic>
#include <deque>
#include <map>
#include <set>

#include "bench_log.hpp"
#include "ssd/record.hpp"

using namespace moonpool;
using namespace moonpool::ssd;
using namespace moonpool::ssd::testing;
using moonpool::testing::Random;

namespace {

uint64_t size_of(uint64_t version) { return version * 7919 % 40'000; }

// What a crash may leave of a key: one of the versions that no synced write or removal has made obsolete. An
// object that the ring came round to was not removed: it may be back.
struct History {
    uint64_t written = 0;  // versions, ever
    std::set<uint64_t> possible;
    bool removed = false;        // after the last write
    bool synced = false;         // the last version was there at the last sync
    bool touched_since = false;  // since then
};

class Story {
   public:
    explicit Story(uint64_t salt) : random_(salt), disk_(fake_disk()), log_(must_open(small_log(disk_))) {
        if (salt % 2 != 0) disk_->slow(random_.next());
    }

    void life() {
        disk_->die(random_.between(1, 160));
        for (int step = 0; step < 400 && !disk_->dead(); ++step) {
            std::string name = "k" + std::to_string(random_.below(25));
            History& history = keys_[name];
            switch (random_.below(8)) {
                case 0: {
                    log_->remove(key_of(*log_, name));
                    history.touched_since = history.removed = true;
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
                    uint64_t version = ++history.written;
                    std::vector<std::byte> bytes = content(number(name, version), size_of(version));
                    if (put(*log_, name, bytes) == Outcome::kRefused) break;
                    history.possible.insert(version);
                    history.touched_since = true;
                    history.removed = false;
                }
            }
            if (random_.one_in(20)) CHECK(log_->check_integrity());
        }
    }

    void crash_and_check() {
        log_->close();
        std::map<std::string, bool> in_memory;
        for (auto& [name, history] : keys_) in_memory[name] = log_->find(key_of(*log_, name)).has_value();
        log_.reset();
        disk_->crash(random_);
        log_ = must_open(small_log(disk_));
        CHECK(log_->check_integrity());
        // A start that finds too little room forgets the oldest.
        bool none_forgotten = counter(*log_, "ssd_evicted_total") == 0;
        for (auto& [name, history] : keys_) {
            CAPTURE(name);
            std::vector<std::byte> bytes;
            Outcome outcome = get(*log_, name, bytes);
            if (outcome == Outcome::kDone) {
                uint64_t version = version_of(name, bytes);
                CHECK(history.possible.contains(version));
                history.possible = {version};
            } else {
                CHECK(outcome == Outcome::kMiss);
                bool must_be_there =
                    history.synced && !history.touched_since && in_memory[name] && none_forgotten;
                CHECK_FALSE(must_be_there);
                if (none_forgotten) history.possible.clear();
            }
        }
        REQUIRE(sync(*log_) == Outcome::kDone);
        for (auto& [name, history] : keys_) {
            history.synced = log_->find(key_of(*log_, name)).has_value();
            history.touched_since = history.removed = false;
        }
    }

   private:
    static uint64_t number(const std::string& name, uint64_t version) {
        return xxh3_64(name.data(), name.size()) + version;
    }

    uint64_t version_of(const std::string& name, const std::vector<std::byte>& bytes) {
        for (uint64_t version = keys_[name].written; version >= 1; --version) {
            if (bytes == content(number(name, version), size_of(version))) return version;
        }
        FAIL("bytes that were never written under " << name);
        return 0;
    }

    void read(const std::string& name) {
        std::vector<std::byte> bytes;
        if (get(*log_, name, bytes) != Outcome::kDone) return;
        const History& history = keys_[name];
        CHECK_FALSE(history.removed);
        REQUIRE_FALSE(history.possible.empty());
        CHECK(version_of(name, bytes) == *history.possible.rbegin());
    }

    void remember_sync() {
        for (auto& [name, history] : keys_) {
            history.synced = log_->find(key_of(*log_, name)).has_value();
            history.touched_since = false;
            std::set<uint64_t>& possible = history.possible;
            if (history.removed) {
                possible.clear();
            } else if (!possible.empty()) {
                possible = {*possible.rbegin()};
            }
        }
    }

    Random random_;
    std::shared_ptr<FakeDisk> disk_;
    std::unique_ptr<Log> log_;
    std::map<std::string, History> keys_;
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

TEST_CASE("ssd recovery: no record goes to a segment before its header is safe") {
    auto disk = fake_disk();
    std::map<uint64_t, uint64_t> headers;  // by segment: syncs before it was written
    uint64_t records = 0, early = 0;
    disk->fail([&](bool write, uint64_t offset, size_t) {
        if (!write || offset < kSegmentsBegin) return 0;
        uint64_t segment = (offset - kSegmentsBegin) / kSegment;
        if ((offset - kSegmentsBegin) % kSegment == 0) {
            headers[segment] = disk->syncs;
        } else {
            ++records;
            early += !headers.contains(segment) || headers[segment] == disk->syncs;
        }
        return 0;
    });
    auto log = must_open(small_log(disk));
    std::deque<std::vector<std::byte>> bytes;
    std::deque<Call> calls;
    for (int i = 0; i < 60; ++i) {
        bytes.push_back(content(i, 30'000));
        REQUIRE(log->write(key_of(*log, "o" + std::to_string(i)), "", {bytes.back()},
                           crc32c(0, bytes.back().data(), bytes.back().size()), calls.emplace_back().done()));
    }
    for (Call& call : calls) CHECK(call.wait() == Outcome::kDone);
    log.reset();
    CHECK(headers.size() > 8);
    CHECK(records > 60);
    CHECK(early == 0);
}

TEST_CASE("ssd recovery: what is removed while it is written is gone for good with the next sync") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    REQUIRE(put(*log, "first", content(1, 10'000)) == Outcome::kDone);
    disk->hold();
    std::vector<std::byte> bytes = content(2, 10'000);
    Call written, replaced, synced;
    auto write = [&](Call& call) {
        return log->write(key_of(*log, "gone"), "", {bytes}, crc32c(0, bytes.data(), bytes.size()),
                          call.done());
    };
    bool again = false;
    SUBCASE("removed") {}
    SUBCASE("replaced, and removed") { again = true; }
    CHECK(write(written));
    CHECK(eventually([&] { return disk->waiting() == 1; }));
    if (again) CHECK(write(replaced));
    CHECK(log->remove(key_of(*log, "gone")));
    // The removals are on their way, though what they remove is, too.
    CHECK(eventually([&] { return disk->waiting() >= 2; }));
    log->sync(synced.done());
    disk->release();
    CHECK(synced.wait() == Outcome::kDone);
    disk->kill();
    log.reset();
    disk->crash([](uint64_t) { return false; });
    log = must_open(small_log(disk));
    CHECK(log->find(key_of(*log, "first")));
    CHECK_FALSE(log->find(key_of(*log, "gone")));
}

TEST_CASE("ssd recovery: a segment counts until what was copied from it is safe") {
    auto disk = fake_disk();
    LogOptions options = small_log(disk, 128);  // so large that writing goes on while a segment is reclaimed
    auto log = must_open(options);
    auto in_segment = [](uint64_t offset) { return (offset - kSegmentsBegin) % kSegment; };
    auto is_header = [&](uint64_t offset) { return offset >= kSegmentsBegin && in_segment(offset) == 0; };
    auto reclaimed = [&] { return counter(*log, "ssd_reclaimed_segments_total") != 0; };
    uint64_t headers = 0, footers = 0;
    std::atomic<bool> copying{false};
    disk->fail([&](bool write, uint64_t offset, size_t) {
        if (!write) copying = true;
        if (!write) return 0;
        headers += is_header(offset);
        footers += in_segment(offset) == kSegment - kBlockBytes;
        // The copies are written, and the next segment begins.
        disk->last_write = is_header(offset) && reclaimed();
        return 0;
    });
    // But the copies are not synced; only a seal that still lacks its footer is.
    disk->hold_syncs([&] { return footers + 1 < headers || !reclaimed(); });
    REQUIRE(put(*log, "kept", content(1, 50'000)) == Outcome::kDone);
    for (uint64_t i = 0; !disk->dead() && i < 4000; ++i) {
        put(*log, "churn", content(i, 5'000));
        if (copying) REQUIRE(eventually(reclaimed));
    }
    REQUIRE(disk->dead());
    log.reset();
    disk->fail({});
    disk->hold_syncs({});
    disk->crash(is_header);  // all that the disk had not synced is lost but for that header
    log = must_open(options);
    std::vector<std::byte> bytes;
    CHECK(get(*log, "kept", bytes) == Outcome::kDone);
    CHECK(bytes == content(1, 50'000));
}

// Else it could have been removed in between, and its removal be nowhere.
TEST_CASE("ssd recovery: what could not be read at one start does not count at the next") {
    for (uint64_t unreadable : {uint64_t{0}, uint64_t{kBlockBytes}}) {  // a header, or records
        CAPTURE(unreadable);
        auto disk = fake_disk();
        {
            auto log = must_open(small_log(disk));
            REQUIRE(put(*log, "a", content(1, 100)) == Outcome::kDone);
            REQUIRE(sync(*log) == Outcome::kDone);
            disk->kill();
        }
        disk->crash([](uint64_t) { return false; });
        disk->fail([&](bool write, uint64_t offset, size_t bytes) {
            bool header = offset == kSegmentsBegin && bytes == kBlockBytes;
            bool all = offset == kSegmentsBegin && bytes > kBlockBytes;
            return !write && (unreadable == 0 ? header : all) ? EIO : 0;
        });
        {
            auto log = must_open(small_log(disk));
            CHECK_FALSE(log->find(key_of(*log, "a")));
            disk->fail({});
            log->remove(key_of(*log, "a"));
            REQUIRE(sync(*log) == Outcome::kDone);  // as LogSet asks for, before the node serves
            disk->kill();
        }
        disk->crash([](uint64_t) { return false; });
        auto log = must_open(small_log(disk));
        CHECK_FALSE(log->find(key_of(*log, "a")));
        REQUIRE(put(*log, "b", content(2, 100)) == Outcome::kDone);
        log.reset();
        log = must_open(small_log(disk));
        CHECK(log->find(key_of(*log, "b")));
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

TEST_CASE("ssd recovery: the oldest of an owner is what was written first, wherever its segment lies") {
    constexpr int kObjects = 31;  // one a segment: the ring of 12 has come round, and stands in its middle
    auto disk = fake_disk();
    {
        auto log = must_open(small_log(disk));
        for (int i = 0; i < kObjects; ++i)
            REQUIRE(put(*log, "k" + std::to_string(i), content(i, 100'000)) == Outcome::kDone);
    }
    auto log = must_open(small_log(disk));
    auto there = [&] {
        std::vector<int> found;
        for (int i = 0; i < kObjects; ++i) {
            if (log->has(key_of(*log, "k" + std::to_string(i)).hash)) found.push_back(i);
        }
        return found;
    };
    std::vector<int> before = there();
    REQUIRE(before.size() >= 6);
    while (before.size() > 1) {
        CHECK(log->trim("default", log->bytes_of("default") - 1, 1) == 1);
        before.erase(before.begin());
        CHECK(there() == before);
        CHECK(log->check_integrity());
    }
}

TEST_CASE("ssd recovery: what a lower maximum of records took out stays away when it is raised again") {
    auto disk = fake_disk();
    auto name = [](int i) { return "o" + std::to_string(i); };
    {
        auto log = must_open(small_log(disk));
        for (int i = 0; i < 10; ++i) REQUIRE(put(*log, name(i), content(i, 500)) == Outcome::kDone);
        log->close();
    }
    LogOptions few = small_log(disk);
    few.records_max = 4;
    std::vector<std::byte> bytes;
    {
        auto log = must_open(few);
        CHECK(log->check_integrity());
        int there = 0;
        for (int i = 0; i < 10; ++i) there += get(*log, name(i), bytes) == Outcome::kDone;
        CHECK(there == 4);
        for (int i = 0; i < 10; ++i) log->remove(key_of(*log, name(i)));
        REQUIRE(sync(*log) == Outcome::kDone);
        log->close();
    }
    auto log = must_open(small_log(disk));
    for (int i = 0; i < 10; ++i) CHECK(get(*log, name(i), bytes) == Outcome::kMiss);
}
