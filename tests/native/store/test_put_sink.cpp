// Where the bytes of a PUT go: into the memory of their objects, never beside it.
#include <doctest/doctest.h>

#include <cstring>

#include "../random.hpp"
#include "base/crc32c.hpp"
#include "store/node/put_sink.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

// Two objects in an arena, of which the first has less memory than its row says: nothing that a PUT can do.
struct Wrong {
    std::vector<std::byte> arena = std::vector<std::byte>(4096, std::byte{0xEE});
    std::vector<std::byte> bytes = std::vector<std::byte>(200, std::byte{0x11});
    PutSink sink;

    Wrong() {
        for (auto [offset, room] : {std::pair<uint64_t, uint64_t>{0, 60}, {1024, 100}}) {
            PutRow row;
            row.size = 100;
            row.name = "x";
            row.extent = Extent{offset, room};
            row.to = arena.data() + offset;
            sink.rows.push_back(row);
        }
    }
    void check() {
        CHECK(sink.complete());
        CHECK(sink.rows[0].outcome == PutOutcome::kRefused);
        CHECK(sink.rows[1].outcome == PutOutcome::kStored);
        CHECK(sink.rows[1].crc_here == crc32c(0, bytes.data() + 100, 100));
        for (size_t i = 0; i < arena.size(); ++i) {
            if (i < 60) continue;  // the refused object's own
            bool second = i >= 1024 && i < 1124;
            REQUIRE(arena[i] == (second ? std::byte{0x11} : std::byte{0xEE}));
        }
    }
};

}  // namespace

TEST_CASE("put sink: bytes that would leave an object's memory are forgotten, and the object refused") {
    SUBCASE("from the socket") {
        Wrong put;
        for (size_t at = 0; at < 200;) {
            iovec parts[32];
            size_t n = put.sink.targets(parts, 32);
            REQUIRE(n != 0);
            uint64_t moved = 0;
            for (size_t i = 0; i < n; ++i) {
                std::memcpy(parts[i].iov_base, put.bytes.data() + at + moved, parts[i].iov_len);
                moved += parts[i].iov_len;
            }
            put.sink.advance(moved);
            at += moved;
        }
        put.check();
    }
    SUBCASE("from what was read ahead, in pieces") {
        Random random(800);
        Wrong put;
        for (size_t at = 0; at < 200;) {
            size_t n = std::min<size_t>(random.between(1, 60), 200 - at);
            REQUIRE(put.sink.take(put.bytes.data() + at, n) == n);
            at += n;
        }
        put.check();
    }
}
