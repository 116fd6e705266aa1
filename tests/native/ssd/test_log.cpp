// The log: what was written is read back, also by the next log of the directory; faults of the disk.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "bench_log.hpp"
#include "ssd/record.hpp"

using namespace moonpool;
using namespace moonpool::ssd;
using namespace moonpool::ssd::testing;

TEST_CASE("ssd log: objects of all sizes come back, also after a restart") {
    auto disk = fake_disk();
    std::vector<uint64_t> sizes = {0, 1, 4095, 4096, 4097, 16384, 16385, 65536, 100'000};
    {
        auto log = must_open(small_log(disk));
        for (uint64_t size : sizes) {
            CHECK(put(*log, "o" + std::to_string(size), content(size, size), "parent") == Outcome::kDone);
        }
        std::vector<std::byte> bytes;
        for (uint64_t size : sizes) {
            CHECK(get(*log, "o" + std::to_string(size), bytes) == Outcome::kDone);
            CHECK(bytes == content(size, size));
        }
        CHECK(log->check_integrity());
    }
    auto log = must_open(small_log(disk));
    std::vector<std::byte> bytes;
    for (uint64_t size : sizes) {
        CHECK(get(*log, "o" + std::to_string(size), bytes) == Outcome::kDone);
        CHECK(bytes == content(size, size));
        CHECK(log->find(key_of(*log, "o" + std::to_string(size)), true)->parent == "parent");
    }
    CHECK(counter(*log, "ssd_recovered_scanned_segments") == 0);
    CHECK(get(*log, "another", bytes) == Outcome::kMiss);
    CHECK(log->check_integrity());
}

TEST_CASE("ssd log: an object of several parts") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    std::vector<std::byte> whole = content(7, 50'000);
    std::span<const std::byte> all(whole);
    Call call;
    REQUIRE(log->write(key_of(*log, "parts"), "",
                       {all.first(100), all.subspan(100, 30'000), all.subspan(30'100)},
                       crc32c(0, whole.data(), whole.size()), call.done()));
    CHECK(call.wait() == Outcome::kDone);
    std::vector<std::byte> bytes;
    CHECK(get(*log, "parts", bytes) == Outcome::kDone);
    CHECK(bytes == whole);
}

TEST_CASE("ssd log: the number of a space is given back when nobody has it and no object is of it") {
    auto disk = fake_disk();
    {
        auto log = must_open(small_log(disk));
        CHECK(put(*log, "kept", content(1, 5000)) == Outcome::kDone);
        log->leave_space(log->space(kSpace));
        for (int i = 0; i < 10'000; ++i) log->leave_space(log->space("tenant" + std::to_string(i)));
        CHECK(counter(*log, "ssd_spaces") < 10);
        std::vector<std::byte> bytes;
        CHECK(get(*log, "kept", bytes) == Outcome::kDone);
        CHECK(log->check_integrity());
    }
    auto log = must_open(small_log(disk));
    for (int i = 0; i < 100; ++i) log->leave_space(log->space("tenant" + std::to_string(i)));
    std::vector<std::byte> bytes;
    CHECK(get(*log, "kept", bytes) == Outcome::kDone);
    CHECK(bytes == content(1, 5000));
    CHECK(log->check_integrity());
}

TEST_CASE("ssd log: what was removed or replaced stays so after a restart, sealed or not") {
    auto disk = fake_disk();
    moonpool::testing::Random random(1);
    for (bool sealed : {true, false}) {
        CAPTURE(sealed);
        {
            auto log = must_open(small_log(disk));
            CHECK(put(*log, "gone", content(1, 5000)) == Outcome::kDone);
            CHECK(put(*log, "new", content(2, 5000)) == Outcome::kDone);
            CHECK(log->remove(key_of(*log, "gone")));
            CHECK_FALSE(log->remove(key_of(*log, "gone")));
            CHECK(put(*log, "new", content(3, 6000)) == Outcome::kDone);
            CHECK(sync(*log) == Outcome::kDone);
            if (!sealed) disk->die();  // nothing is sealed any more
            if (!sealed) put(*log, "last", content(4, 10));
        }
        if (!sealed) disk->crash(random);
        auto log = must_open(small_log(disk));
        std::vector<std::byte> bytes;
        CHECK(get(*log, "gone", bytes) == Outcome::kMiss);
        CHECK(get(*log, "new", bytes) == Outcome::kDone);
        CHECK(bytes == content(3, 6000));
        CHECK((counter(*log, "ssd_recovered_scanned_segments") == 0) == sealed);
    }
}

TEST_CASE("ssd log: a ring: what nobody asked for goes in order, what is used stays, the disk is bounded") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    uint64_t bytes_max = 65536 + 12 * kSegment;
    CHECK(put(*log, "hot", content(99, 30'000)) == Outcome::kDone);
    std::vector<std::byte> bytes;
    for (uint64_t i = 0; i < 300; ++i) {
        REQUIRE(put(*log, "o" + std::to_string(i), content(i, 20'000)) == Outcome::kDone);
        REQUIRE(get(*log, "hot", bytes) == Outcome::kDone);
    }
    CHECK(bytes == content(99, 30'000));
    CHECK(get(*log, "o0", bytes) == Outcome::kMiss);
    CHECK(get(*log, "o299", bytes) == Outcome::kDone);
    CHECK(counter(*log, "ssd_evicted_total") > 100);
    CHECK(counter(*log, "ssd_copied_total") > 0);
    CHECK(log->check_integrity());
    log.reset();
    CHECK(disk->image.size() <= bytes_max);
    auto again = must_open(small_log(disk));
    CHECK(get(*again, "hot", bytes) == Outcome::kDone);
    CHECK(get(*again, "o0", bytes) == Outcome::kMiss);
    CHECK(get(*again, "o299", bytes) == Outcome::kDone);
}

TEST_CASE("ssd log: while it is at most half full, nothing is lost to what was replaced") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk, 16));
    for (int i = 0; i < 6; ++i)
        REQUIRE(put(*log, "k" + std::to_string(i), content(i, 60'000)) == Outcome::kDone);
    for (int round = 0; round < 200; ++round) {
        REQUIRE(put(*log, "churn", content(1000 + round, 50'000)) == Outcome::kDone);
    }
    std::vector<std::byte> bytes;
    for (int i = 0; i < 6; ++i) {
        CHECK(get(*log, "k" + std::to_string(i), bytes) == Outcome::kDone);
        CHECK(bytes == content(i, 60'000));
    }
    CHECK(counter(*log, "ssd_evicted_total") == 0);
}

TEST_CASE("ssd log: flipped bits are a miss and the object is forgotten, never wrong bytes") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    REQUIRE(put(*log, "a", content(1, 40'000)) == Outcome::kDone);
    REQUIRE(put(*log, "b", content(2, 40'000)) == Outcome::kDone);
    REQUIRE(sync(*log) == Outcome::kDone);
    std::vector<std::byte> wanted = content(1, 40'000);
    auto at =
        std::search(disk->image.begin(), disk->image.end(), wanted.begin() + 20'000, wanted.begin() + 20'100);
    REQUIRE(at != disk->image.end());
    *at ^= std::byte{4};
    std::vector<std::byte> bytes;
    CHECK(get(*log, "a", bytes) == Outcome::kMiss);
    CHECK(get(*log, "b", bytes) == Outcome::kDone);
    CHECK_FALSE(log->find(key_of(*log, "a")));
    CHECK(counter(*log, "ssd_corrupt_total") == 1);
    log.reset();
    log = must_open(small_log(disk));
    CHECK_FALSE(log->find(key_of(*log, "a")));
}

TEST_CASE("ssd log: a disk that does not answer holds up nobody") {
    auto disk = fake_disk();
    LogOptions options = small_log(disk);
    options.queue_max = 10;
    auto log = must_open(options);
    disk->hold();
    std::vector<std::byte> bytes = content(1, 60'000);
    std::atomic<int> done{0};
    int taken = 0;
    for (int i = 0; i < 100; ++i) {
        taken += log->write(key_of(*log, "o" + std::to_string(i)), "", {bytes},
                            crc32c(0, bytes.data(), bytes.size()), [&](Outcome) { ++done; });
    }
    CHECK(taken == 10);  // the stated maximum, and no wait
    CHECK(done == 0);
    CHECK(counter(*log, "ssd_writes_waiting") == 10);
    CHECK(counter(*log, "ssd_write_refused_total") == 90);
    CHECK_FALSE(log->find(key_of(*log, "o0")));
    disk->release();
    REQUIRE(sync(*log) == Outcome::kDone);
    CHECK(done == 10);
    CHECK(log->find(key_of(*log, "o0")));
    log->close();
}

TEST_CASE("ssd log: a full or read-only disk ends writing with one sentence, reading goes on") {
    for (int error : {ENOSPC, EROFS, EDQUOT}) {
        auto disk = fake_disk();
        auto log = must_open(small_log(disk));
        REQUIRE(put(*log, "before", content(1, 20'000)) == Outcome::kDone);
        disk->fail([error](bool write, uint64_t, size_t) { return write ? error : 0; });
        CHECK(put(*log, "after", content(2, 20'000)) == Outcome::kFailed);
        CHECK_FALSE(log->accepts_writes());
        CHECK(log->trouble().find("writing to /disk failed: ") == 0);
        CHECK(put(*log, "later", content(3, 100)) == Outcome::kRefused);
        std::vector<std::byte> bytes;
        CHECK(get(*log, "before", bytes) == Outcome::kDone);
        CHECK(sync(*log) == Outcome::kRefused);
        log->close();
    }
}

TEST_CASE("ssd log: a segment that cannot be written is left out, the next one serves") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    REQUIRE(put(*log, "a", content(1, 20'000)) == Outcome::kDone);
    uint64_t bad_end = 65536 + kSegment;
    disk->fail(
        [bad_end](bool write, uint64_t offset, size_t) { return write && offset < bad_end ? EIO : 0; });
    CHECK(put(*log, "b", content(2, 20'000)) == Outcome::kFailed);
    CHECK(put(*log, "b", content(2, 20'000)) == Outcome::kDone);
    CHECK(log->accepts_writes());
    std::vector<std::byte> bytes;
    CHECK(get(*log, "a", bytes) == Outcome::kDone);
    CHECK(get(*log, "b", bytes) == Outcome::kDone);
    for (int i = 0; i < 200; ++i)
        REQUIRE(put(*log, "c" + std::to_string(i), content(i, 20'000)) == Outcome::kDone);
    CHECK(counter(*log, "ssd_write_errors_total") >= 1);
    CHECK(log->check_integrity());
}

// A full index makes the segment that was closed last the one to reclaim. Its footer waits for the sync of
// the next segment's header, and the reclaimer's own sync may overtake that one: then the footer is still on
// its way while the segment is draining, or free already.
TEST_CASE("ssd log: a segment whose footer fails while it is reclaimed, or after, is not used again") {
    for (bool freed : {true, false}) {
        CAPTURE(freed);
        constexpr uint64_t kEnd = 65536 + kSegment;  // of the first segment
        auto disk = fake_disk();
        LogOptions options = small_log(disk, 8);
        options.records_max = 4;
        auto log = must_open(options);
        for (int i = 0; i < 3; ++i)  // as many as a segment holds
            REQUIRE(put(*log, "o" + std::to_string(i), content(i, 35'000)) == Outcome::kDone);
        REQUIRE(disk->syncs_begun() == 2);  // of the superblock, and of the header

        disk->hold_sync(3);  // of the next header
        if (!freed) disk->hold_sync(4);
        std::vector<std::byte> bytes = content(3, 35'000);
        Call fourth, synced;
        REQUIRE(log->write(key_of(*log, "o3"), "", {bytes}, crc32c(0, bytes.data(), bytes.size()),
                           fourth.done()));
        REQUIRE(eventually([&] { return disk->syncs_begun() == 3; }));
        CHECK(put(*log, "o4", bytes) == Outcome::kRefused);  // the index is full
        log->sync(synced.done());                            // wakes the log's thread: it reclaims
        REQUIRE(eventually([&] { return disk->syncs_begun() == 4; }));
        auto footer_fails = [](bool write, uint64_t offset, size_t) {
            return write && offset == kEnd - kBlockBytes ? EIO : 0;
        };
        if (freed) {
            REQUIRE(eventually([&] { return counter(*log, "ssd_syncs_total") == 2; }));
            disk->hold_write(kEnd - kBlockBytes);
            disk->release_sync(3);
            REQUIRE(eventually([&] { return counter(*log, "ssd_free_bytes") == 7 * kSegment; }));
            disk->fail(footer_fails);
            disk->release();
        } else {
            disk->fail(footer_fails);
            disk->release_sync(3);
        }
        REQUIRE(eventually([&] { return counter(*log, "ssd_write_errors_total") == 1; }));
        disk->release_sync(4);
        CHECK(synced.wait() == Outcome::kDone);
        CHECK(fourth.wait() == Outcome::kDone);
        CHECK(counter(*log, "ssd_free_bytes") == 6 * kSegment);

        disk->fail([](bool write, uint64_t offset, size_t) { return write && offset < kEnd ? EIO : 0; });
        for (int i = 4; i < 60; ++i) {
            log->remove(key_of(*log, "o" + std::to_string(i - 1)));
            REQUIRE(put(*log, "o" + std::to_string(i), bytes) == Outcome::kDone);
        }
        CHECK(counter(*log, "ssd_write_errors_total") == 1);
        CHECK(log->check_integrity());
        log->close();
    }
}

TEST_CASE("ssd log: reads that fail are failures of that object; many in a row turn the directory off") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    for (int i = 0; i < 80; ++i)
        REQUIRE(put(*log, "o" + std::to_string(i), content(i, 500)) == Outcome::kDone);
    disk->fail([](bool write, uint64_t, size_t) { return write ? 0 : EIO; });
    std::vector<std::byte> bytes;
    CHECK(get(*log, "o0", bytes) == Outcome::kFailed);
    CHECK(get(*log, "o0", bytes) == Outcome::kMiss);
    CHECK(log->trouble() == "");
    for (int i = 1; i < 80; ++i) get(*log, "o" + std::to_string(i), bytes);
    CHECK(log->trouble().find("reading from /disk failed") == 0);
    CHECK_FALSE(log->find(key_of(*log, "o79")));
    CHECK_FALSE(log->accepts_writes());
}

TEST_CASE("ssd log: recovery reads summaries, not data") {
    auto disk = fake_disk();
    {
        auto log = must_open(small_log(disk, 64));
        for (int i = 0; i < 150; ++i)
            REQUIRE(put(*log, "o" + std::to_string(i), content(i, 30'000)) == Outcome::kDone);
    }
    disk->read_bytes = 0;
    auto log = must_open(small_log(disk, 64));
    CHECK(counter(*log, "ssd_objects") == 150);
    // Of each segment its first and last block, and 150 headers.
    CHECK(counter(*log, "ssd_recovered_bytes_read") <= 64 * 3 * kBlockBytes + 150 * 256);
    CHECK(counter(*log, "ssd_recovered_scanned_segments") == 0);
}

TEST_CASE("ssd log: one directory, one node") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    Result<std::unique_ptr<Log>> second = Log::open(small_log(disk));
    REQUIRE_FALSE(second);
    CHECK(second.error().text ==
          "/disk is in use by another node; give each node an SSD directory of its own");
    log->close();
    CHECK(Log::open(small_log(disk)));
}

TEST_CASE("ssd log: a real directory: made, kept, refused when it is foreign or too small") {
    namespace fs = std::filesystem;
    fs::path directory = fs::temp_directory_path() / ("moonpool-ssd-" + std::to_string(::getpid()));
    fs::remove_all(directory);
    for (const char* io : {"io_uring", "threads"}) {
        LogOptions options;
        options.directory = directory.string();
        options.bytes = 16 << 20;
        options.segment_bytes = 1 << 20;
        options.io = io;
        std::vector<std::byte> bytes;
        {
            Result<std::unique_ptr<Log>> log = Log::open(options);
            if (!log && std::string(io) == "io_uring") {
                MESSAGE(log.error().text);
                continue;
            }
            REQUIRE(log);
            CHECK(std::string((*log)->io_name()) == io);
            for (int i = 0; i < 60; ++i) {
                REQUIRE(put(**log, "o" + std::to_string(i), content(i, 300'001)) == Outcome::kDone);
            }
            CHECK(get(**log, "o59", bytes) == Outcome::kDone);
            CHECK(bytes == content(59, 300'001));
            Result<std::unique_ptr<Log>> second = Log::open(options);
            REQUIRE_FALSE(second);
            CHECK(second.error().text.find("in use by another node") != std::string::npos);
        }
        auto log = must_open(options);
        CHECK(get(*log, "o59", bytes) == Outcome::kDone);
        CHECK(bytes == content(59, 300'001));
        CHECK(get(*log, "o0", bytes) == Outcome::kMiss);
    }
    LogOptions options;
    options.directory = directory.string();
    options.bytes = 1 << 20;
    options.segment_bytes = 1 << 20;
    Result<std::unique_ptr<Log>> small = Log::open(options);
    REQUIRE_FALSE(small);
    CHECK(small.error().text.find("needs at least") != std::string::npos);

    fs::remove_all(directory);
    fs::create_directory(directory);
    fs::create_directory(directory / "lost+found");
    options.bytes = 16 << 20;
    CHECK(Log::open(options));
    fs::remove_all(directory);
    fs::create_directory(directory);
    std::ofstream(directory / "thesis.txt") << "mine";
    Result<std::unique_ptr<Log>> foreign = Log::open(options);
    REQUIRE_FALSE(foreign);
    CHECK(foreign.error().text.find("(thesis.txt); give an empty directory") != std::string::npos);
    fs::remove_all(directory);
    fs::create_directory(directory);
    std::ofstream(directory / kLogFile) << std::string(100'000, 'x');
    Result<std::unique_ptr<Log>> other = Log::open(options);
    REQUIRE_FALSE(other);
    CHECK(other.error().text.find("is no SSD log of moonpool; give another directory") != std::string::npos);
    fs::remove_all(directory);
}

TEST_CASE("ssd log: another version of the format is refused by name") {
    auto disk = fake_disk();
    must_open(small_log(disk)).reset();
    disk->image[12] = std::byte{9};
    Result<std::unique_ptr<Log>> log = Log::open(small_log(disk));
    REQUIRE_FALSE(log);
    CHECK(log.error().text.find("has format 9, and this moonpool reads format 1") != std::string::npos);
}

TEST_CASE("ssd log: a larger size keeps what is there, a smaller one starts empty") {
    auto disk = fake_disk();
    {
        auto log = must_open(small_log(disk, 12));
        REQUIRE(put(*log, "a", content(1, 20'000)) == Outcome::kDone);
    }
    std::vector<std::byte> bytes;
    {
        auto log = must_open(small_log(disk, 20));
        CHECK(get(*log, "a", bytes) == Outcome::kDone);
        CHECK(bytes == content(1, 20'000));
    }
    auto log = must_open(small_log(disk, 10));
    CHECK(get(*log, "a", bytes) == Outcome::kMiss);
}

TEST_CASE("ssd log: what is too large or too long is refused") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    CHECK(put(*log, "big", content(1, log->object_bytes_max())) == Outcome::kDone);
    CHECK(put(*log, "big", content(1, kSegment)) == Outcome::kRefused);
    CHECK(put(*log, std::string(20'000, 'n'), content(1, 100)) == Outcome::kRefused);
    CHECK(counter(*log, "ssd_write_refused_total") == 2);
}

TEST_CASE("ssd log: writers and readers from several threads, while segments are reclaimed") {
    auto disk = fake_disk();
    auto log = must_open(small_log(disk));
    std::atomic<uint64_t> wrong{0}, hits{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            moonpool::testing::Random random(100 + t);
            for (int i = 0; i < 150; ++i) {
                uint64_t number = random.below(60);
                std::string name = "o" + std::to_string(number);
                std::vector<std::byte> wanted = content(number, 1000 + number * 400);
                if (random.one_in(3)) put(*log, name, wanted);
                if (random.one_in(2)) {
                    auto held = std::make_shared<std::vector<std::byte>>(wanted);
                    log->write(key_of(*log, name), "", {std::span<const std::byte>(*held)},
                               crc32c(0, held->data(), held->size()), [held](Outcome) {});
                    if (random.one_in(4)) log->remove(key_of(*log, name));
                    continue;
                }
                std::optional<Found> found = log->find(key_of(*log, name));
                if (!found) continue;
                auto bytes = std::make_shared<std::vector<std::byte>>(found->size);
                std::promise<Outcome> promise;
                auto future = promise.get_future();
                if (!log->read(key_of(*log, name), *bytes, [&](Outcome o) { promise.set_value(o); }))
                    continue;
                if (future.get() != Outcome::kDone) continue;
                ++hits;
                if (*bytes != wanted) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(hits > 0);
    CHECK(sync(*log) == Outcome::kDone);
    CHECK(log->check_integrity());
}
