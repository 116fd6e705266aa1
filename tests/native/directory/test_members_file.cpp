// The members in shared memory: readers in other processes, here other threads, beside one writer; and what
// is in it does not have to be true.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "../memory_bed.hpp"
#include "directory/members_file.hpp"

using namespace moonpool;

namespace {

std::vector<std::byte> filled(uint64_t epoch, size_t bytes) {
    std::vector<std::byte> rows(bytes);
    for (size_t i = 0; i < bytes; ++i) rows[i] = static_cast<std::byte>((epoch + i) & 0xFF);
    return rows;
}

MembersReader reader_of(const MembersWriter& writer) {
    Result<Fd> fd = writer.read_only_fd();
    REQUIRE(fd);
    Result<MembersReader> reader = MembersReader::open(*fd);
    REQUIRE(reader);
    return std::move(*reader);
}

MembersWriter make() {
    Result<MembersWriter> writer = MembersWriter::create();
    REQUIRE(writer);
    return std::move(*writer);
}

// The page of the header, as a writer that lies has it.
struct Liar {
    explicit Liar(size_t bytes = 2 * kPageBytes) {
        fd.reset(::memfd_create("liar", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    }
    void seal() { REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0); }
    void word(size_t i, uint64_t value) {
        REQUIRE(::pwrite(fd.get(), &value, 8, static_cast<off_t>(i * 8)) == 8);
    }
    Fd fd;
};
constexpr uint64_t kMagic1 = 0x31424D454D4C504DULL;

}  // namespace

TEST_CASE("the members are read as they were last written, rows only where they changed") {
    MembersWriter writer = make();
    MembersReader reader = reader_of(writer);
    REQUIRE(reader.head());
    CHECK(reader.head()->life == 0);
    std::vector<std::byte> rows = filled(7, 100001), found;
    REQUIRE(writer.publish({.life = 3, .epoch = 7, .flags = 2, .newest = 9, .heard_ms = 50}, rows));
    std::optional<MembersHead> head = reader.read(found);
    REQUIRE(head);
    CHECK(head->life == 3);
    CHECK(head->epoch == 7);
    CHECK(head->flags == 2);
    CHECK(head->newest == 9);
    CHECK(head->heard_ms == 50);
    CHECK(found == rows);
    REQUIRE(writer.publish({.life = 3, .epoch = 7, .newest = 10, .heard_ms = 60}, std::nullopt));
    head = reader.read(found);
    REQUIRE(head);
    CHECK(head->newest == 10);
    CHECK(found == rows);
    writer.withdraw();
    REQUIRE(reader.head());
    CHECK(reader.head()->life == 0);
    CHECK(!writer.publish({.life = 3}, std::vector<std::byte>(kMembersFileBytes)));
    REQUIRE(reader.head());
    CHECK(reader.head()->life == 0);
}

TEST_CASE("a process of the host cannot write the members") {
    MembersWriter writer = make();
    Result<Fd> fd = writer.read_only_fd();
    REQUIRE(fd);
    CHECK(::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0) == MAP_FAILED);
    uint64_t word = 1;
    CHECK(::pwrite(fd->get(), &word, sizeof(word), 8) < 0);
    testing::check_not_writable_again(*fd);
    CHECK(::ftruncate(fd->get(), 0) != 0);
}

TEST_CASE("readers never see rows of two writings, nor a head of another one") {
    MembersWriter writer = make();
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> wrong{0}, good{0};
    std::vector<std::thread> readers;
    for (int i = 0; i < 3; ++i) {
        readers.emplace_back([&, reader = reader_of(writer)] {
            std::vector<std::byte> found;
            uint64_t last = 0;
            while (!stop) {
                std::optional<MembersHead> head = reader.read(found);
                if (!head || head->life == 0) continue;
                bool fits = head->newest == head->epoch * 3 && head->heard_ms >= last &&
                            found == filled(head->epoch, head->bytes);
                last = head->heard_ms;
                (fits ? good : wrong) += 1;
            }
        });
    }
    uint64_t written = 0;
    // Until each had its chance, however few cores there are.
    while (written < 300 || (good < 100 && written < 100000)) {
        ++written;
        auto rows = filled(written, 3000 + written % 5 * 1000);
        REQUIRE(
            writer.publish({.life = 1, .epoch = written, .newest = written * 3, .heard_ms = written}, rows));
        if (written % 8 == 0) std::this_thread::yield();
    }
    stop = true;
    for (std::thread& reader : readers) reader.join();
    CHECK(wrong == 0);
    CHECK(good >= 100);
}

TEST_CASE("a list of members that lies is no list") {
    Liar cut;
    cut.word(0, kMagic1);
    CHECK(!MembersReader::open(cut.fd));  // it could be made shorter
    Liar named;
    named.word(0, 1);
    named.seal();
    CHECK(!MembersReader::open(named.fd));
    Liar small(100);
    small.seal();
    CHECK(!MembersReader::open(small.fd));

    Liar liar;
    liar.word(0, kMagic1);
    liar.seal();
    Result<MembersReader> reader = MembersReader::open(liar.fd);
    REQUIRE(reader);
    std::vector<std::byte> found;
    auto head = [&](uint64_t seq, uint64_t bytes, uint64_t crc) {
        liar.word(1, seq);
        liar.word(2, 1);      // life
        liar.word(7, bytes);  // the sixth word of the head
        liar.word(8, crc);
    };
    head(2, 0, 0);
    CHECK(reader->read(found));
    head(2, kPageBytes + 1, 0);
    CHECK(!reader->read(found));
    head(2, UINT64_MAX, 0);
    CHECK(!reader->read(found));
    head(2, UINT64_MAX - 7, 0);
    CHECK(!reader->read(found));
    head(2, 100, 12345);  // zeros have another checksum
    CHECK(!reader->read(found));
    head(3, 0, 0);  // for ever written
    CHECK(!reader->read(found));
    CHECK(!reader->head());
}
