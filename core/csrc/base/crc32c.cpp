// Three kernels, each a template on where the bytes go, so that the checksum alone and the checksum fused with
// a copy are one piece of code:
//   portable     slicing by 8 tables, and the CRC instruction of ARM64;
//   lanes        crc32q in three independent lanes (its latency is 3 cycles, its throughput 1: 8 bytes a cycle);
//   fold         VPCLMULQDQ folding, 256 bytes in flight, for CPUs with AVX-512.
#include "base/crc32c.hpp"

#include <array>
#include <cstring>

#include "base/cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace moonpool {
namespace {

// Everything below works on bit-reflected polynomials: bit 31 - j of a remainder is the coefficient of x^j.
constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1) != 0 ? kPolynomial : 0); }

constexpr uint32_t power_of_x(unsigned n) {
    uint32_t r = 0x80000000;  // x^0
    while (n-- != 0) r = times_x(r);
    return r;
}

// kTables[k][b]: what byte b adds to the remainder when k more bytes follow it.
constexpr auto kTables = [] {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t r = b;
        for (int bit = 0; bit < 8; ++bit) r = times_x(r);
        tables[0][b] = r;
    }
    for (size_t k = 1; k < 8; ++k) {
        for (size_t b = 0; b < 256; ++b) {
            tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xff];
        }
    }
    return tables;
}();

enum class Store { kNone, kCached, kStreaming };

// A kernel takes and gives the raw remainder, without the inversions at both ends. With Store::kNone dst is null.
using Kernel = uint32_t (*)(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size);

// Loads once, stores if asked, and hands over what it stored: the empty asm keeps the compiler from reading the
// source again for the checksum, which it otherwise may.
template <class Word, Store kStore>
inline Word take(uint8_t* dst, const uint8_t* src, size_t at) {
    Word word;
    std::memcpy(&word, src + at, sizeof word);
    if constexpr (kStore != Store::kNone) {
        asm volatile("" : "+r"(word));
        std::memcpy(dst + at, &word, sizeof word);
    }
    return word;
}

template <Store kStore>
uint32_t portable(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = take<uint64_t, kStore>(dst, src, i) ^ crc;
        crc = 0;
        for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
    }
    for (; i < size; ++i) crc = crc >> 8 ^ kTables[0][(crc ^ take<uint8_t, kStore>(dst, src, i)) & 0xff];
    return crc;
}

#if defined(__x86_64__)

#define MOONPOOL_LANES __attribute__((target("sse4.2,pclmul")))
#define MOONPOOL_FOLD __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

template <Store kStore>
MOONPOOL_LANES uint32_t one_lane(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        crc = static_cast<uint32_t>(_mm_crc32_u64(crc, take<uint64_t, kStore>(dst, src, i)));
    }
    for (; i < size; ++i) crc = _mm_crc32_u8(crc, take<uint8_t, kStore>(dst, src, i));
    return crc;
}

// crc * x^(8 * kBytes): the carry-less product of two reflected 32-bit values is x * the product, and crc32q of
// 64 bits from zero multiplies by x^32.
template <unsigned kBytes>
MOONPOOL_LANES inline uint32_t append_zeros(uint32_t crc) {
    constexpr uint32_t kFactor = power_of_x(8 * kBytes - 33);
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(crc)),
                                           _mm_cvtsi32_si128(static_cast<int>(kFactor)), 0);
    return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

template <Store kStore, unsigned kLane>
MOONPOOL_LANES inline uint32_t three_lanes(uint32_t crc, uint8_t* dst, const uint8_t* src) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kLane; i += 8) {
        a = _mm_crc32_u64(a, take<uint64_t, kStore>(dst, src, i));
        b = _mm_crc32_u64(b, take<uint64_t, kStore>(dst, src, i + kLane));
        c = _mm_crc32_u64(c, take<uint64_t, kStore>(dst, src, i + 2 * kLane));
    }
    return append_zeros<2 * kLane>(static_cast<uint32_t>(a)) ^ append_zeros<kLane>(static_cast<uint32_t>(b)) ^
           static_cast<uint32_t>(c);
}

template <Store kStore>
MOONPOOL_LANES uint32_t lanes(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    constexpr unsigned kLong = 1024, kShort = 64;
    size_t i = 0;
    for (; i + 3 * kLong <= size; i += 3 * kLong) crc = three_lanes<kStore, kLong>(crc, dst + i, src + i);
    for (; i + 3 * kShort <= size; i += 3 * kShort) crc = three_lanes<kStore, kShort>(crc, dst + i, src + i);
    return one_lane<kStore>(crc, dst + i, src + i, size - i);
}

template <Store kStore>
MOONPOOL_FOLD inline __m512i take512(uint8_t* dst, const uint8_t* src, size_t at) {
    __m512i word = _mm512_loadu_si512(src + at);
    if constexpr (kStore != Store::kNone) asm volatile("" : "+v"(word));
    if constexpr (kStore == Store::kCached) _mm512_storeu_si512(dst + at, word);
    if constexpr (kStore == Store::kStreaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), word);
    return word;
}

// Moves each 128-bit part of `sum` kBytes further on in the message and adds `next`, which lies there. A part
// is L * x^64 + H with its first 8 bytes L; both are multiplied by their power of x modulo the polynomial, in
// the high half of a 64-bit constant, so that the product (96 bits at most, times x) fits in 128 bits.
template <unsigned kBytes>
MOONPOOL_FOLD inline __m512i fold(__m512i sum, __m512i next) {
    constexpr uint64_t kL = uint64_t{power_of_x(8 * kBytes + 63)} << 32;
    constexpr uint64_t kH = uint64_t{power_of_x(8 * kBytes - 1)} << 32;
    const __m512i factors = _mm512_set4_epi64(kH, kL, kH, kL);
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, factors, 0x00),
                                     _mm512_clmulepi64_epi128(sum, factors, 0x11), next, 0x96);
}

// size >= 256. What is left of the message after folding is 64 bytes with the same remainder.
template <Store kStore>
MOONPOOL_FOLD uint32_t folded(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    __m512i a = take512<kStore>(dst, src, 0), b = take512<kStore>(dst, src, 64);
    __m512i c = take512<kStore>(dst, src, 128), d = take512<kStore>(dst, src, 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    size_t i = 256;
    for (; i + 256 <= size; i += 256) {
        a = fold<256>(a, take512<kStore>(dst, src, i));
        b = fold<256>(b, take512<kStore>(dst, src, i + 64));
        c = fold<256>(c, take512<kStore>(dst, src, i + 128));
        d = fold<256>(d, take512<kStore>(dst, src, i + 192));
    }
    __m512i sum = fold<128>(a, c), other = fold<128>(b, d);
    sum = fold<64>(sum, other);
    for (; i + 64 <= size; i += 64) sum = fold<64>(sum, take512<kStore>(dst, src, i));
    alignas(64) uint8_t rest[64];
    _mm512_store_si512(rest, sum);
    crc = one_lane<Store::kNone>(0, nullptr, rest, sizeof rest);
    if constexpr (kStore == Store::kNone) {
        return one_lane<kStore>(crc, nullptr, src + i, size - i);
    } else {
        return one_lane<Store::kCached>(crc, dst + i, src + i, size - i);
    }
}

#endif

template <Store kStore>
Kernel choose() {
    return portable<kStore>;
}

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
    static const Kernel kernel = choose<Store::kNone>();
    return ~kernel(~crc, nullptr, static_cast<const uint8_t*>(data), size);
}

uint32_t copy_crc32c(uint32_t crc, void* dst, const void* src, size_t size) {
    static const Kernel kernel = choose<Store::kCached>();
    return ~kernel(~crc, static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), size);
}

}  // namespace moonpool
