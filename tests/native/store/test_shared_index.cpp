// The shared index: what a reader finds is always of one generation, its object's bytes included.
//
// Readers map the index and the arena for themselves, at other addresses than the writer, as they do in other
// processes. That is also why ThreadSanitizer has nothing to say about a seqlock's plain reads here: it
// follows addresses, and no address is shared. The words themselves are what proves the absence of torn
// reads.
#include <doctest/doctest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "../memory_bed.hpp"
#include "../random.hpp"
#include "memory/mapping.hpp"
#include "store/shared/shared_index.hpp"
#include "store/shared/space.hpp"

using namespace moonpool;
using moonpool::testing::check_not_writable_again;
using moonpool::testing::Random;

namespace {

const KeyHasher kHash("default", "default", "");

std::string name_of(uint32_t key) { return "key-" + std::to_string(key); }

}  // namespace

// The node goes by it: a client that could write there could make the node do so.
TEST_CASE("shared index: a descriptor to read opens no way to write") {
    IndexWriter writer = std::move(*IndexWriter::create(100, random_incarnation()));
    Fd fd = std::move(*writer.read_only_fd());
    check_not_writable_again(fd);
    writer.publish(3, 7, 0, kHash("a"), "a", {64, 10}, 99);  // the node still does
}

TEST_CASE("arena: its file is opened again by no other user") {
    Result<Arena> arena = Arena::create("test", 1 << 20);
    REQUIRE(arena);
    struct stat what {};
    REQUIRE(::fstat(arena->fd(), &what) == 0);
    CHECK((what.st_mode & 0777) == 0400);
}

TEST_CASE("shared index: published, found, retracted, and found no more") {
    Incarnation life = random_incarnation();
    IndexWriter writer = std::move(*IndexWriter::create(100, life));
    Fd fd = std::move(*writer.read_only_fd());
    IndexReader reader = std::move(*IndexReader::open(fd.get(), writer.bytes(), life));
    std::string longest(kInlineName, 'l'), over(kInlineName + 1, 'o');
    writer.publish(3, 7, 0, kHash("a"), "a", {64, 10}, 99);
    writer.publish(4, 8, 0, kHash(longest), longest, {128, 20}, 98);
    writer.publish(5, 9, 0, kHash(over), over, {192, 30}, 97);
    auto hit = reader.find(0, kHash("a"), "a");
    REQUIRE(hit);
    CHECK(hit->offset == 64);
    CHECK(hit->size == 10);
    CHECK(hit->crc == 99);
    CHECK(hit->slot == 3);
    CHECK(hit->still_valid());
    CHECK(reader.find(0, kHash(longest), longest));
    CHECK_FALSE(reader.find(0, kHash(over), over));  // the node is asked
    CHECK_FALSE(reader.find(1, kHash("a"), "a"));    // another space
    CHECK_FALSE(reader.find(0, kHash("a"), "b"));
    CHECK(reader.at(3, 7));
    CHECK_FALSE(reader.at(3, 6));
    CHECK_FALSE(reader.at(100, 7));
    writer.retract(3);
    CHECK_FALSE(hit->still_valid());
    CHECK_FALSE(reader.find(0, kHash("a"), "a"));
    CHECK_FALSE(reader.at(3, 7));
    writer.publish(3, 10, 0, kHash("a"), "a", {64, 10}, 99);
    CHECK_FALSE(hit->still_valid());  // the same slot and bytes, another generation
}

TEST_CASE("shared index: what is applied of each range, and of the only one") {
    Incarnation life = random_incarnation();
    for (uint32_t ranges : {1u, 3u}) {
        IndexWriter writer = std::move(*IndexWriter::create(100, life));
        Fd fd = std::move(*writer.read_only_fd());
        writer.set_ranges(ranges);
        IndexReader reader = std::move(*IndexReader::open(fd.get(), writer.bytes(), life));
        CHECK(reader.ranges() == ranges);  // before any removal is known
        CHECK(reader.applied(0) == 0);
        for (uint32_t range = 0; range < ranges; ++range) writer.set_applied(range, 10 + range);
        for (uint32_t range = 0; range < ranges; ++range) CHECK(reader.applied(range) == 10 + range);
        // A client of the release before reads one number, which says of several ranges that none is known.
        Mapping mapping = std::move(*Mapping::map(fd.get(), writer.bytes(), false));
        CHECK(reinterpret_cast<const IndexHeader*>(mapping.data())->applied == (ranges == 1 ? 10 : 0));
    }
}

TEST_CASE("shared index: a client cannot write to it") {
    IndexWriter writer = std::move(*IndexWriter::create(10, random_incarnation()));
    Fd fd = std::move(*writer.read_only_fd());
    CHECK_FALSE(Mapping::map(fd.get(), writer.bytes(), true));
}

TEST_CASE("shared index: another life, another size or another file is no index") {
    Incarnation life = random_incarnation();
    IndexWriter writer = std::move(*IndexWriter::create(1000, life));
    Fd fd = std::move(*writer.read_only_fd());
    CHECK(IndexReader::open(fd.get(), writer.bytes(), life));
    CHECK_FALSE(IndexReader::open(fd.get(), writer.bytes(), random_incarnation()));
    CHECK_FALSE(IndexReader::open(fd.get(), writer.bytes() - kPageBytes, life));
    CHECK_FALSE(IndexReader::open(fd.get(), 100, life));
    Arena other = std::move(*Arena::create("zeros", 1 << 20));
    REQUIRE(other.commit(1 << 20));
    CHECK_FALSE(IndexReader::open(other.fd(), 1 << 20, life));
}

TEST_CASE("shared index: readers never see a torn entry or another object's bytes") {
    constexpr uint32_t kKeys = 40, kSlots = 16;
    constexpr uint64_t kBytes = 512;
    Incarnation life = random_incarnation();
    IndexWriter writer = std::move(*IndexWriter::create(kSlots, life));
    Fd index_fd = std::move(*writer.read_only_fd());
    Arena arena = std::move(*Arena::create("arena", kSlots * kBytes));
    REQUIRE(arena.commit(kSlots * kBytes));
    Mapping memory = std::move(*Mapping::map(arena.fd(), kSlots * kBytes, true));

    std::atomic<bool> stop{false};
    std::atomic<uint64_t> hits{0}, late{0}, wrong{0};
    std::vector<std::thread> readers;
    for (int r = 0; r < 2; ++r) {
        readers.emplace_back([&, r] {
            IndexReader reader = std::move(*IndexReader::open(index_fd.get(), writer.bytes(), life));
            Mapping view = std::move(*Mapping::map(arena.fd(), kSlots * kBytes, false));
            Random random(500 + static_cast<uint64_t>(r));
            uint64_t copy[kBytes / 8];
            while (!stop.load(std::memory_order_relaxed)) {
                auto key = static_cast<uint32_t>(random.below(kKeys));
                std::string name = name_of(key);
                auto hit = reader.find(0, kHash(name), name);
                if (!hit) continue;
                // The writer makes crc, size and each word of the object out of key and generation.
                uint64_t generation = hit->seq / 2;
                std::memcpy(copy, view.data() + hit->offset, kBytes);
                bool sound = hit->crc == key + generation % 1000 * kKeys && hit->size == kBytes &&
                             hit->offset == hit->slot * kBytes;
                bool same = true;
                for (uint64_t word : copy) same &= word == (generation << 8 | key);
                if (!hit->still_valid()) {
                    ++late;
                    continue;
                }
                ++hits;
                if (!sound || !same) ++wrong;
            }
        });
    }
    Random random(600);
    std::vector<int> key_in(kSlots, -1);
    uint64_t generation = 0;
    for (int step = 0; step < 200000 || hits.load() < 1000; ++step) {
        auto slot = static_cast<uint32_t>(random.below(kSlots));
        if (key_in[slot] >= 0) {
            writer.retract(slot);
            key_in[slot] = -1;
            continue;
        }
        auto key = static_cast<uint32_t>(random.below(kKeys));
        if (std::find(key_in.begin(), key_in.end(), int(key)) != key_in.end()) continue;
        ++generation;
        auto* words = reinterpret_cast<uint64_t*>(memory.data() + slot * kBytes);
        for (uint64_t i = 0; i < kBytes / 8; ++i) {
            reinterpret_cast<std::atomic<uint64_t>*>(words + i)->store(generation << 8 | key,
                                                                       std::memory_order_relaxed);
        }
        writer.publish(slot, generation, 0, kHash(name_of(key)), name_of(key), {slot * kBytes, kBytes},
                       static_cast<uint32_t>(key + generation % 1000 * kKeys));
        key_in[slot] = int(key);
    }
    stop = true;
    for (auto& reader : readers) reader.join();
    MESSAGE("hits " << hits.load() << ", overtaken by the writer " << late.load());
    CHECK(wrong.load() == 0);
}
