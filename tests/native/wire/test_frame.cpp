// Frames: random bytes are never read out of bounds (ASan watches), what was written reads back.
#include <doctest/doctest.h>

#include <memory>

#include "../random.hpp"
#include "wire/frame.hpp"

using namespace moonpool;
using moonpool::testing::Random;

TEST_CASE("frame: the header is 24 bytes in this order") {
    std::vector<std::byte> out;
    size_t at = begin_frame(out, Kind::kLookup, kFlagOneWay, 0x1122334455667788);
    Writer w(out);
    w.text16("key");
    finish_frame(out, at);
    const uint8_t expected[] = {0x4D, 0x50, 0x4C, 0x31, 1,    20,   2,    0,    5,    0, 0, 0,   0,   0,  0,
                                0,    0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 3, 0, 'k', 'e', 'y'};
    REQUIRE(out.size() == sizeof(expected));
    CHECK(std::memcmp(out.data(), expected, sizeof(expected)) == 0);
}

TEST_CASE("frame: a reader that ran short stays failed and gives zeros") {
    const char bytes[] = {1, 0, 0};
    Reader r(std::as_bytes(std::span(bytes)));
    CHECK(r.number<uint16_t>() == 1);
    CHECK(r.ok());
    CHECK_FALSE(r.done());
    CHECK(r.number<uint32_t>() == 0);
    CHECK_FALSE(r.ok());
    CHECK(r.left() == 0);
    CHECK(r.number<uint8_t>() == 0);  // not the byte that was left
    CHECK(r.bytes(0).empty());
    CHECK_FALSE(r.done());
}

TEST_CASE("frame: random reads of random bytes stay inside") {
    Random random(200);
    for (int round = 0; round < 20000; ++round) {
        size_t size = random.below(64);
        // A block of exactly that size: ASan sees one byte too many.
        auto block = std::make_unique<std::byte[]>(size);
        for (size_t i = 0; i < size; ++i) block[i] = std::byte(random.one_in(3) ? 0xFF : random.below(256));
        Reader r(std::span<const std::byte>(block.get(), size));
        size_t consumed = 0, left = size;
        bool ok = true;
        uint64_t sum = 0;
        for (int step = 0; step < 12; ++step) {
            switch (random.below(6)) {
                case 0:
                    sum += r.number<uint8_t>();
                    break;
                case 1:
                    sum += r.number<uint16_t>();
                    break;
                case 2:
                    sum += r.number<uint32_t>();
                    break;
                case 3:
                    sum += r.number<uint64_t>();
                    break;
                case 4:
                    for (char c : r.bytes(random.below(80))) sum += static_cast<unsigned char>(c);
                    break;
                case 5:
                    for (char c : r.text16()) sum += static_cast<unsigned char>(c);
                    break;
            }
            REQUIRE(r.left() <= left);
            left = r.left();
            if (!ok) REQUIRE_FALSE(r.ok());
            ok = r.ok();
            if (!ok) REQUIRE(left == 0);
            consumed = size - left;
        }
        CHECK(consumed <= size);
        [[maybe_unused]] volatile uint64_t read = sum;  // so that no read is optimised away
    }
}

TEST_CASE("frame: what a writer writes a reader reads, and nothing is left") {
    Random random(201);
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::byte> out;
        Writer w(out);
        std::vector<std::pair<int, std::string>> script;
        for (uint64_t n = random.below(20); n > 0; --n) {
            std::string text(random.below(100), char('a' + random.below(26)));
            if (random.one_in(2)) {
                w.text16(text);
                script.emplace_back(0, text);
            } else {
                w.number(static_cast<uint64_t>(text.size() * 0x0101010101ull));
                script.emplace_back(1, text);
            }
        }
        Reader r(out);
        for (auto& [verb, text] : script) {
            if (verb == 0) {
                REQUIRE(r.text16() == text);
            } else {
                REQUIRE(r.number<uint64_t>() == text.size() * 0x0101010101ull);
            }
        }
        REQUIRE(r.done());
    }
}

TEST_CASE("frame: a text that is no UTF-8 ends the reading, a name may be any bytes") {
    // Each pair: bytes, and whether RFC 3629 calls them UTF-8.
    const std::pair<std::string_view, bool> cases[] = {
        {"", true},
        {"node-a", true},
        {"\xC2\x80 \xDF\xBF", true},
        {"\xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80", true},
        {"\xF0\x90\x80\x80 \xF4\x8F\xBF\xBF", true},
        {"\x80", false},              // a byte that only continues
        {"\xC1\x81", false},          // 'A' in two bytes
        {"\xE0\x9F\xBF", false},      // two bytes' worth in three
        {"\xF0\x8F\xBF\xBF", false},  // three bytes' worth in four
        {"\xED\xA0\x80", false},      // a surrogate
        {"\xF4\x90\x80\x80", false},  // above U+10FFFF
        {"\xF5\x80\x80\x80", false},
        {"node\xE2\x82", false},  // cut off
        {"\xE2\x82 ", false},
        {"\xF0\x90\x80 ", false},
        {"\xFF", false},
    };
    for (auto [bytes, good] : cases) {
        CAPTURE(bytes.size());
        std::vector<std::byte> out;
        Writer w(out);
        w.text16(bytes);
        w.number(uint32_t{7});
        Reader names(out);
        CHECK(names.bytes16() == bytes);
        CHECK(names.number<uint32_t>() == 7);
        CHECK(names.done());
        Reader texts(out);
        CHECK(texts.text16() == (good ? bytes : std::string_view()));
        CHECK(texts.ok() == good);
        CHECK(texts.number<uint32_t>() == (good ? 7u : 0u));
    }
}
