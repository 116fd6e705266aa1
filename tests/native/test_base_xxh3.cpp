// Vectors made with the reference implementation (python-xxhash), one at least on each side of every border
// between the forms of the algorithm. Byte i of the input is (131 * i + 7 * (i / 256) + 17) mod 256.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "base/xxh3.hpp"

using namespace moonpool;

namespace {

struct Vector {
    size_t size;
    uint64_t hash64;
    Hash128 hash128;
};

// clang-format off
constexpr Vector kVectors[] = {
    {0, 0x2d06800538d394c2, {0x6001c324468d497f, 0x99aa06d3014798d8}},
    {1, 0xf319fe2bdfcdfebd, {0xf319fe2bdfcdfebd, 0xf46d8182f5a4994a}},
    {2, 0x6c2ca74ca555b69d, {0x6c2ca74ca555b69d, 0xaa3a4e432e4c5d12}},
    {3, 0xa107bb65b715c89b, {0xa107bb65b715c89b, 0xd3d72a54a914da93}},
    {4, 0x509f0567aa8a3123, {0xb7a8c115066c18e7, 0xc867fd251db3e6d7}},
    {8, 0xb1433dc39b7f946e, {0x60bc8bccebcb0734, 0xc1dcf76c2349c002}},
    {9, 0xfe2542440b36ddc7, {0xf11ccf925dc0bf79, 0x02d0cd6fb1a9d265}},
    {16, 0x715189ff3dcdcff6, {0x9803f5a245db3129, 0x086a52d17f54b78c}},
    {17, 0x7d33163b8af0179c, {0xc2f249861431c09e, 0x4721ae433384feed}},
    {32, 0x909ca0c765b1753c, {0x396876a912beb5b7, 0x10df4c9eeb742ab3}},
    {33, 0x60f5a6ac1c8b4a59, {0x8add50d5bb14ae2d, 0xed8fee4e85e36550}},
    {42, 0x7f9051c9e4d31418, {0xe17ebb9ad5eb4334, 0xede44f982c34e68c}},
    {64, 0x0991d97cd58dd82d, {0xed32ab74cf20b7b2, 0x1a441eabad80cad8}},
    {65, 0x8e4f57a107b176db, {0x2939be58e6279765, 0x2d9bf2943de7cd3c}},
    {100, 0xb9406bca5041745d, {0x57867474c980e02c, 0x276a8ea346aedc9a}},
    {128, 0xee847f7fcef4ddbc, {0x37906c780c01150d, 0xd25fb3a54bc43c6e}},
    {129, 0x7e3e7b750239d4fc, {0x3dc26c2565608a13, 0xce245f502a54b831}},
    {160, 0x0f2adb08915ea24e, {0x9aa0b0f8218a9985, 0xe1bdeafd3a53e087}},
    {240, 0x44089a144aade02d, {0xe1a4f0922856b524, 0xb39403b41f31eeaf}},
    {241, 0xed93572e52acac83, {0xed93572e52acac83, 0x06229596e1de710a}},
    {512, 0xd24bcbd9dfefec5b, {0xd24bcbd9dfefec5b, 0x4b91a5d838988d7e}},
    {1024, 0xf9bf1ee035a040ac, {0xf9bf1ee035a040ac, 0x6c7c2b741d62c6f7}},
    {1025, 0x70a447382d332cf9, {0x70a447382d332cf9, 0x4e7b46cefa316692}},
    {4097, 0x3d18adfda2110825, {0x3d18adfda2110825, 0x46e32d77ac2544c9}},
    {65536, 0x64e51eb67250abb5, {0x64e51eb67250abb5, 0x111430263924bdb0}},
};
// clang-format on

std::vector<uint8_t> input(size_t size) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(131 * i + 7 * (i / 256) + 17);
    return bytes;
}

}  // namespace

TEST_CASE("xxh3: vectors of the reference implementation") {
    for (const Vector& vector : kVectors) {
        CAPTURE(vector.size);
        std::vector<uint8_t> bytes = input(vector.size);
        CHECK(xxh3_64(bytes.data(), bytes.size()) == vector.hash64);
        CHECK(xxh3_128(bytes.data(), bytes.size()) == vector.hash128);
    }
    CHECK(xxh3_64(nullptr, 0) == kVectors[0].hash64);
    CHECK(xxh3_128(nullptr, 0) == kVectors[0].hash128);
}

TEST_CASE("xxh3: every size at every alignment reads its input only, and each byte counts") {
    // An exact allocation: the address sanitizer sees one byte too far on either side.
    for (size_t size = 1; size <= 600; ++size) {
        CAPTURE(size);
        std::vector<uint8_t> bytes = input(size);
        const uint64_t hash64 = xxh3_64(bytes.data(), size);
        const Hash128 hash128 = xxh3_128(bytes.data(), size);
        for (size_t shift = 1; shift < 8; ++shift) {
            std::vector<uint8_t> shifted(size + shift);
            std::memcpy(shifted.data() + shift, bytes.data(), size);
            REQUIRE(xxh3_64(shifted.data() + shift, size) == hash64);
            REQUIRE(xxh3_128(shifted.data() + shift, size) == hash128);
        }
        for (size_t i = 0; i < size; i += size < 64 ? 1 : 37) {
            bytes[i] ^= 0x40;
            REQUIRE(xxh3_64(bytes.data(), size) != hash64);
            REQUIRE(xxh3_128(bytes.data(), size) != hash128);
            bytes[i] ^= 0x40;
        }
    }
}
