// Copies between the parts of an object and one range, against plain loops, and memory that no copier
// reaches.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "../random.hpp"
#include "base/crc32c.hpp"
#include "memory/copier.hpp"
#include "memory/kind_name.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

// A buffer cut into parts at random, empty ones among them.
std::vector<MemoryRef> cut(std::vector<std::byte>& bytes, Random& random) {
    std::vector<MemoryRef> parts;
    for (size_t at = 0; at < bytes.size();) {
        size_t n = std::min<size_t>(random.below(300), bytes.size() - at);
        parts.push_back(MemoryRef::host(bytes.data() + at, n));
        at += n;
    }
    return parts;
}

std::vector<std::byte> noise(size_t size, Random& random) {
    std::vector<std::byte> bytes(size);
    random.fill(bytes.data(), bytes.size());
    return bytes;
}

}  // namespace

TEST_CASE("gather and scatter keep the order of the parts, and sum what they copy") {
    Random random;
    for (size_t size : {0, 1, 299, 5000}) {
        std::vector<std::byte> from = noise(size, random), middle(size), to(size);
        uint32_t expected = crc32c(0, from.data(), size), gathered = 0, scattered = 0;
        REQUIRE(gather(MemoryRef::host(middle.data(), size), cut(from, random), &gathered));
        CHECK(middle == from);
        CHECK(gathered == expected);
        std::vector<MemoryRef> parts = cut(to, random);
        REQUIRE(scatter(parts, MemoryRef::host(middle.data(), size), &scattered));
        CHECK(to == from);
        CHECK(scattered == expected);
        CHECK(*checksum(parts, size) == expected);
        std::fill(to.begin(), to.end(), std::byte{0});
        REQUIRE(scatter(parts, MemoryRef::host(middle.data(), size), nullptr));
        CHECK(to == from);
    }
}

TEST_CASE("scatter passes over an empty part") {
    std::vector<std::byte> from(4, std::byte{1}), to(4);
    MemoryRef parts[] = {MemoryRef::host(to.data(), 2), MemoryRef::host(to.data() + 2, 0),
                         MemoryRef::host(to.data() + 2, 2)};
    uint32_t crc = 0;
    REQUIRE(scatter(parts, MemoryRef::host(from.data(), 4), &crc));
    CHECK(to == from);
    CHECK(crc == crc32c(0, from.data(), 4));
}

TEST_CASE("scatter leaves what lies behind a shorter object as it was") {
    std::vector<std::byte> from(100, std::byte{1}), to(200, std::byte{7});
    MemoryRef parts[] = {MemoryRef::host(to.data(), 60), MemoryRef::host(to.data() + 60, 140)};
    REQUIRE(scatter(parts, MemoryRef::host(from.data(), 100), nullptr));
    CHECK(to[99] == std::byte{1});
    CHECK(to[100] == std::byte{7});
    uint32_t crc = *checksum(parts, 100);
    CHECK(crc == crc32c(0, from.data(), 100));
}

TEST_CASE("memory that no copier reaches is refused, and not touched") {
    std::vector<std::byte> host(64);
    for (MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kFile, MemoryKind{200}}) {
        MemoryRef there{.address = 0x1000, .bytes = 64, .device = 0, .kind = kind};
        MemoryRef here = MemoryRef::host(host.data(), 64);
        CHECK(find_copier(kind, MemoryKind::kHost) == nullptr);
        Status in = gather(here, {&there, 1}, nullptr), out = scatter({&there, 1}, here, nullptr);
        REQUIRE_FALSE(in);
        REQUIRE_FALSE(out);
        Result<uint32_t> summed = checksum({&there, 1}, 64);
        REQUIRE_FALSE(summed);
        CHECK(summed.error().text.find(kind_name(kind)) != std::string::npos);
        CHECK(*checksum({&there, 1}, 0) == 0);
        CHECK(in.error().code == Code::kInvalidArgument);
        CHECK(in.error().text.find(kind_name(kind)) != std::string::npos);
    }
    MemoryRef pinned = MemoryRef::host(host.data(), 64);
    pinned.kind = MemoryKind::kPinned;
    CHECK(scatter({&pinned, 1}, MemoryRef::host(host.data(), 0), nullptr));
}
