// Kernels, each a template on what is stored, so that the checksum alone and the checksum fused with a copy
// are one piece of code:
//   portable  slicing by 8 tables
//   arm       the CRC instructions of ARM64, one lane
//   lanes     x86: crc32q in three independent lanes (latency 3 cycles, throughput 1: 8 bytes a cycle)
//   folded    x86 with AVX-512 and VPCLMULQDQ: 256 bytes in flight (16 bytes a cycle on Zen 5)
//
// Measured on one Zen 5 core (virtual machine, 4 KiB pages), GB/s of object bytes, source and destination:
//                                 both in L2     objects over 2 x 256 MiB
//                                 64 KiB         4 KiB    64 KiB    1 MiB
//   memcpy (glibc)                125            15       20        17-19
//   folded, ordinary stores       62             15       17        16-19
//   folded, streaming stores      34             15       24        24
//   lanes, ordinary stores        25             19       19        19
//   lanes, streaming stores       23             17       23        23
//   copy 4 KiB, then checksum it  45             11       11-13     12
//   portable                      2.0            2.0      2.0       2.0
#include "base/crc32c.hpp"

#include <array>
#include <cstring>
#include <vector>

#include "base/cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moonpool {
namespace {

// Everything below works on bit-reflected polynomials: bit 31 - j of a remainder is the coefficient of x^j.
constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1) != 0 ? kPolynomial : 0); }

[[maybe_unused]] constexpr uint32_t power_of_x(unsigned n) {
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

// kStreaming goes around the caches, with 64-byte lines filled in order: dst is on a multiple of 64 then.
enum class Store { kNone, kCached, kStreaming };

// A kernel takes and gives the raw remainder, without the inversions at both ends. With Store::kNone dst is
// null.
using Kernel = uint32_t (*)(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size);

// Loads once, stores if asked, and hands over what it stored: the empty asm keeps the compiler from reading
// the source again for the checksum, which it otherwise may.
template <class Word, Store kStore>
inline Word take(uint8_t* dst, const uint8_t* src, size_t at) {
    Word word;
    std::memcpy(&word, src + at, sizeof word);
    if constexpr (kStore == Store::kNone) return word;
    asm volatile("" : "+r"(word));
#if defined(__x86_64__)
    if constexpr (kStore == Store::kStreaming && sizeof(Word) == 8) {
        _mm_stream_si64(reinterpret_cast<long long*>(dst + at), static_cast<long long>(word));
        return word;
    }
#endif
    std::memcpy(dst + at, &word, sizeof word);
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

// Ends of less than a line do not stream.
template <Store kStore>
constexpr Store kWeak = kStore == Store::kNone ? Store::kNone : Store::kCached;

inline uint8_t* at(uint8_t* dst, size_t offset) { return dst == nullptr ? nullptr : dst + offset; }

// sse4.2 implies crc32 for gcc, and not for every clang.
#define MOONPOOL_LANES __attribute__((target("sse4.2,crc32,pclmul")))
#define MOONPOOL_FOLD __attribute__((target("sse4.2,crc32,pclmul,avx512f,vpclmulqdq")))

template <Store kStore>
MOONPOOL_LANES uint32_t one_lane(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        crc = static_cast<uint32_t>(_mm_crc32_u64(crc, take<uint64_t, kStore>(dst, src, i)));
    }
    for (; i < size; ++i) crc = _mm_crc32_u8(crc, take<uint8_t, kStore>(dst, src, i));
    return crc;
}

// crc * x^(8 * kBytes): the carry-less product of two reflected 32-bit values is x * the product, and crc32q
// of 64 bits from zero multiplies by x^32.
template <unsigned kBytes>
MOONPOOL_LANES inline uint32_t append_zeros(uint32_t crc) {
    constexpr uint32_t kFactor = power_of_x(8 * kBytes - 33);
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(crc)),
                                           _mm_cvtsi32_si128(static_cast<int>(kFactor)), 0);
    return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

// Lanes of 192 bytes: short ones keep the prefetchers on one stream. With 1 KiB lanes a copy that fits in the
// cache is a fifth faster (31 GB/s), but one that does not falls from 19 to 7 GB/s.
template <Store kStore>
MOONPOOL_LANES uint32_t lanes(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    constexpr unsigned kLane = 192;
    size_t start = 0;
    for (; start + 3 * kLane <= size; start += 3 * kLane) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = start; i < start + kLane; i += 8) {
            a = _mm_crc32_u64(a, take<uint64_t, kStore>(dst, src, i));
            b = _mm_crc32_u64(b, take<uint64_t, kStore>(dst, src, i + kLane));
            c = _mm_crc32_u64(c, take<uint64_t, kStore>(dst, src, i + 2 * kLane));
        }
        crc = append_zeros<2 * kLane>(static_cast<uint32_t>(a)) ^
              append_zeros<kLane>(static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(c);
    }
    if constexpr (kStore == Store::kStreaming) _mm_sfence();
    return one_lane<kWeak<kStore>>(crc, at(dst, start), src + start, size - start);
}

template <Store kStore>
MOONPOOL_FOLD inline __m512i take512(uint8_t* dst, const uint8_t* src, size_t at) {
    __m512i word = _mm512_loadu_si512(src + at);
    if constexpr (kStore != Store::kNone) asm volatile("" : "+v"(word));
    if constexpr (kStore == Store::kCached) _mm512_storeu_si512(dst + at, word);
    if constexpr (kStore == Store::kStreaming)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), word);
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

template <Store kStore>
MOONPOOL_FOLD uint32_t folded(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    if (size < 256) return lanes<kWeak<kStore>>(crc, dst, src, size);
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
    __m512i sum = fold<64>(fold<128>(a, c), fold<128>(b, d));
    for (; i + 64 <= size; i += 64) sum = fold<64>(sum, take512<kStore>(dst, src, i));
    if constexpr (kStore == Store::kStreaming) _mm_sfence();
    alignas(64) uint8_t same_remainder[64];  // as the message so far
    _mm512_store_si512(same_remainder, sum);
    crc = one_lane<Store::kNone>(0, nullptr, same_remainder, sizeof same_remainder);
    return one_lane<kWeak<kStore>>(crc, at(dst, i), src + i, size - i);
}

#elif defined(__aarch64__)

// In assembly because compilers disagree on how a single function gets the intrinsics. One lane, to be short:
// no benchmark has measured it yet.
template <Store kStore>
uint32_t arm(uint32_t crc, uint8_t* dst, const uint8_t* src, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = take<uint64_t, kStore>(dst, src, i);
        asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    }
    for (; i < size; ++i) {
        uint32_t byte = take<uint8_t, kStore>(dst, src, i);
        asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
    }
    return crc;
}

#endif

// From here on a copy streams. Below it the fence costs what streaming saves; and an object that is read
// again at once comes slower out of memory (64 KiB written and read back: 17 GB/s against 20; after 1 MiB of
// other objects there is no difference).
constexpr size_t kStreamingMin = 32 << 10;

template <Kernel kRead>
uint32_t checksum_by(uint32_t crc, const void* data, size_t size) {
    return ~kRead(~crc, nullptr, static_cast<const uint8_t*>(data), size);
}

template <Kernel kCached, Kernel kStreaming>
uint32_t copy_by(uint32_t crc, void* dst, const void* src, size_t size) {
    auto* to = static_cast<uint8_t*>(dst);
    const auto* from = static_cast<const uint8_t*>(src);
    if (size < kStreamingMin) return ~kCached(~crc, to, from, size);
    size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
    return ~kStreaming(kCached(~crc, to, from, head), to + head, from + head, size - head);
}

template <Kernel kRead, Kernel kCached, Kernel kStreaming>
constexpr Crc32cVariant variant(const char* name) {
    return {name, checksum_by<kRead>, copy_by<kCached, kStreaming>};
}

#define MOONPOOL_VARIANT(kernel, streaming) \
    variant<kernel<Store::kNone>, kernel<Store::kCached>, kernel<Store::streaming>>(#kernel)

std::vector<Crc32cVariant> usable_variants() {
    std::vector<Crc32cVariant> usable;
#if defined(__x86_64__)
    if (cpu().clmul512) usable.push_back(MOONPOOL_VARIANT(folded, kStreaming));
    if (cpu().crc32) usable.push_back(MOONPOOL_VARIANT(lanes, kStreaming));
#elif defined(__aarch64__)
    if (cpu().crc32) usable.push_back(MOONPOOL_VARIANT(arm, kCached));
#endif
    usable.push_back(MOONPOOL_VARIANT(portable, kCached));
    return usable;
}

}  // namespace

std::span<const Crc32cVariant> crc32c_variants() {
    static const std::vector<Crc32cVariant> usable = usable_variants();
    return usable;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
    static const auto fastest = crc32c_variants().front().crc32c;
    return fastest(crc, data, size);
}

uint32_t copy_crc32c(uint32_t crc, void* dst, const void* src, size_t size) {
    static const auto fastest = crc32c_variants().front().copy_crc32c;
    return fastest(crc, dst, src, size);
}

}  // namespace moonpool
