// XXH3 after its public specification, with the seed fixed to 0. The long form is a plain loop over eight
// 64-bit lanes that the compiler may vectorise; our inputs are keys of about 100 bytes, which never reach it.
//
// Three forms by length: up to 16 bytes, up to 240, and more. Each has its own mixing, and all constants
// and the order of operations are the specification's: hashes stand on disks (docs/ssd.md) and travel
// between nodes of different builds, so no result may ever change. test_base_xxh3.cpp compares with vectors
// of the reference implementation. Pure functions; the words are little-endian on every platform that is
// supported.
#include "base/xxh3.hpp"

#include <bit>
#include <cstring>

namespace moonpool {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr uint64_t kP32_1 = 0x9E3779B1, kP32_2 = 0x85EBCA77, kP32_3 = 0xC2B2AE3D;
constexpr uint64_t kP64_1 = 0x9E3779B185EBCA87, kP64_2 = 0xC2B2AE3D27D4EB4F, kP64_3 = 0x165667B19E3779F9;
constexpr uint64_t kP64_4 = 0x85EBCA77C2B2AE63, kP64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

constexpr size_t kSecretSize = 192;
alignas(64) constexpr uint8_t kSecret[] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static_assert(sizeof kSecret == kSecretSize);

uint32_t read32(const uint8_t* p) {
    uint32_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

uint64_t read64(const uint8_t* p) {
    uint64_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// The specification's default secret, at byte offsets that it fixes for each form.
uint64_t secret32(size_t at) { return read32(kSecret + at); }
uint64_t secret64(size_t at) { return read64(kSecret + at); }

Hash128 multiply(uint64_t a, uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    Wide product = Wide{a} * b;
    return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

// The 128-bit product folded to 64 bits: the basic step of all forms but the longest.
uint64_t multiply_fold(uint64_t a, uint64_t b) {
    Hash128 product = multiply(a, b);
    return product.low ^ product.high;
}

// Final mixing, so that each bit of the input can reach each bit of the hash.
uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * kMix1;
    return h ^ h >> 32;
}

uint64_t avalanche_xxh64(uint64_t h) {
    h = (h ^ h >> 33) * kP64_2;
    h = (h ^ h >> 29) * kP64_3;
    return h ^ h >> 32;
}

// Inputs of 1 to 3 bytes as one word that names all of them and the length.
uint32_t pack_1_to_3(const uint8_t* in, size_t size) {
    return uint32_t{in[0]} << 16 | uint32_t{in[size / 2]} << 24 | in[size - 1] |
           static_cast<uint32_t>(size) << 8;
}

uint64_t mix16(const uint8_t* in, size_t secret_at) {
    return multiply_fold(read64(in) ^ secret64(secret_at), read64(in + 8) ^ secret64(secret_at + 8));
}

// Two times 16 bytes into both halves; each half also takes the other pair's plain sum, so that neither is
// a function of one pair alone.
void mix32(Hash128& acc, const uint8_t* a, const uint8_t* b, size_t secret_at) {
    acc.low += mix16(a, secret_at);
    acc.low ^= read64(b) + read64(b + 8);
    acc.high += mix16(b, secret_at + 16);
    acc.high ^= read64(a) + read64(a + 8);
}

// Inputs over 240 bytes: stripes of 64 bytes into eight lanes, 16 stripes (a block of 1,024 bytes, each with
// the secret moved on by 8 bytes), then a scramble; the last stripe ends at the input's end and may overlap.
struct Lanes {
    uint64_t lane[8] = {kP32_3, kP64_1, kP64_2, kP64_3, kP64_4, kP32_2, kP64_5, kP32_1};

    void accumulate(const uint8_t* in, size_t secret_at) {
        for (size_t i = 0; i < 8; ++i) {
            uint64_t data = read64(in + 8 * i);
            uint64_t keyed = data ^ secret64(secret_at + 8 * i);
            lane[i ^ 1] += data;
            lane[i] += (keyed & 0xffffffff) * (keyed >> 32);
        }
    }

    void scramble() {
        for (size_t i = 0; i < 8; ++i) {
            lane[i] = (lane[i] ^ lane[i] >> 47 ^ secret64(kSecretSize - 64 + 8 * i)) * kP32_1;
        }
    }

    uint64_t merge(size_t secret_at, uint64_t start) const {
        for (size_t i = 0; i < 8; i += 2) {
            start += multiply_fold(lane[i] ^ secret64(secret_at + 8 * i),
                                   lane[i + 1] ^ secret64(secret_at + 8 * i + 8));
        }
        return avalanche(start);
    }
};

// The number of whole blocks decides how often the lanes are scrambled; the last stripe is added with a
// secret of its own, whether it overlaps or not.
Lanes long_input(const uint8_t* in, size_t size) {
    constexpr size_t kStripe = 64, kBlock = 1024;
    Lanes lanes;
    size_t stripes = (size - 1) / kStripe;  // all but the last
    for (size_t i = 0; i < stripes; ++i) {
        lanes.accumulate(in + i * kStripe, 8 * (i % (kBlock / kStripe)));
        if ((i + 1) % (kBlock / kStripe) == 0) lanes.scramble();
    }
    lanes.accumulate(in + size - kStripe, kSecretSize - kStripe - 7);
    return lanes;
}

// Up to 16 bytes: one or two reads that overlap when the input is shorter than both.
uint64_t short_64(const uint8_t* in, size_t size) {
    if (size > 8) {
        uint64_t low = read64(in) ^ secret64(24) ^ secret64(32);
        uint64_t high = read64(in + size - 8) ^ secret64(40) ^ secret64(48);
        return avalanche(size + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }
    if (size >= 4) {
        uint64_t h = read32(in + size - 4) + (uint64_t{read32(in)} << 32);
        h ^= secret64(8) ^ secret64(16);
        h = (h ^ std::rotl(h, 49) ^ std::rotl(h, 24)) * kMix2;
        h = (h ^ ((h >> 35) + size)) * kMix2;
        return h ^ h >> 28;
    }
    if (size > 0) return avalanche_xxh64(pack_1_to_3(in, size) ^ secret32(0) ^ secret32(4));
    return avalanche_xxh64(secret64(56) ^ secret64(64));
}

// Both halves have to be mixed: the directory chooses its shard by one and the slot in it by the other.
Hash128 short_128(const uint8_t* in, size_t size) {
    if (size > 8) {
        uint64_t low = read64(in), high = read64(in + size - 8);
        Hash128 m = multiply(low ^ high ^ secret64(32) ^ secret64(40), kP64_1);
        m.low += uint64_t{size - 1} << 54;
        high ^= secret64(48) ^ secret64(56);
        m.high += high + (high & 0xffffffff) * (kP32_2 - 1);
        m.low ^= __builtin_bswap64(m.high);
        Hash128 h = multiply(m.low, kP64_2);
        h.high += m.high * kP64_2;
        return {avalanche(h.low), avalanche(h.high)};
    }
    if (size >= 4) {
        uint64_t both = read32(in) + (uint64_t{read32(in + size - 4)} << 32);
        Hash128 m = multiply(both ^ secret64(16) ^ secret64(24), kP64_1 + (size << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low = (m.low ^ m.low >> 35) * kMix2;
        return {m.low ^ m.low >> 28, avalanche(m.high)};
    }
    if (size > 0) {
        uint32_t low = pack_1_to_3(in, size);
        uint32_t high = std::rotl(__builtin_bswap32(low), 13);
        return {avalanche_xxh64(low ^ secret32(0) ^ secret32(4)),
                avalanche_xxh64(high ^ secret32(8) ^ secret32(12))};
    }
    return {avalanche_xxh64(secret64(64) ^ secret64(72)), avalanche_xxh64(secret64(80) ^ secret64(88))};
}

// 17 to 240 bytes. Up to 128, pairs of 16 bytes are taken from both ends towards the middle; over that, from
// the start on: eight of them, an avalanche, the rest with the secret from byte 3, and the last 16.
uint64_t medium_64(const uint8_t* in, size_t size) {
    uint64_t acc = size * kP64_1;
    if (size <= 128) {
        for (size_t i = 0, pairs = (size - 1) / 32 + 1; i < pairs; ++i) {
            acc += mix16(in + 16 * i, 32 * i) + mix16(in + size - 16 * (i + 1), 32 * i + 16);
        }
        return avalanche(acc);
    }
    for (size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < size / 16; ++i) acc += mix16(in + 16 * i, 16 * (i - 8) + 3);
    return avalanche(acc + mix16(in + size - 16, 136 - 17));
}

Hash128 medium_128(const uint8_t* in, size_t size) {
    Hash128 acc{size * kP64_1, 0};
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
            mix32(acc, in + 16 * i, in + size - 16 * (i + 1), 32 * i);
        }
    } else {
        for (size_t i = 0; i < 4; ++i) mix32(acc, in + 32 * i, in + 32 * i + 16, 32 * i);
        acc = {avalanche(acc.low), avalanche(acc.high)};
        for (size_t i = 4; i < size / 32; ++i) mix32(acc, in + 32 * i, in + 32 * i + 16, 32 * (i - 4) + 3);
        mix32(acc, in + size - 16, in + size - 32, 136 - 17 - 16);
    }
    uint64_t high = acc.low * kP64_1 + acc.high * kP64_4 + size * kP64_2;
    return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

}  // namespace

// The bounds between the forms are part of the algorithm.
uint64_t xxh3_64(const void* data, size_t size) {
    const auto* in = static_cast<const uint8_t*>(data);
    if (size <= 16) return short_64(in, size);
    if (size <= 240) return medium_64(in, size);
    return long_input(in, size).merge(11, size * kP64_1);
}

Hash128 xxh3_128(const void* data, size_t size) {
    const auto* in = static_cast<const uint8_t*>(data);
    if (size <= 16) return short_128(in, size);
    if (size <= 240) return medium_128(in, size);
    Lanes lanes = long_input(in, size);
    return {lanes.merge(11, size * kP64_1), lanes.merge(kSecretSize - 64 - 11, ~(size * kP64_2))};
}

}  // namespace moonpool
