#include "base/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moonpool {
namespace {

// FIPS 180-4, 4.2.2: the first 32 bits of the fractions of the cube roots of the first 64 primes.
alignas(64) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

}  // namespace

void sha256_compress_plain(uint32_t* state, const uint8_t* data, size_t blocks) {
    for (; blocks != 0; --blocks, data += 64) {
        uint32_t w[64];
        std::memcpy(w, data, 64);
        for (int i = 0; i < 16; ++i) {
            if constexpr (std::endian::native == std::endian::little) w[i] = __builtin_bswap32(w[i]);
        }
        for (int i = 16; i < 64; ++i) {
            uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
            uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; ++i) {
            uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
            uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

namespace {

#if defined(__x86_64__)

// sha256rnds2 wants the state as two vectors, {a,b,e,f} and {c,d,g,h} from the top lane down; the message
// schedule lives in four vectors of four words, each replaced by the words 16 further on after its use.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_ni(uint32_t* state, const uint8_t* data,
                                                             size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
    __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
    __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
    __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; blocks != 0; --blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            w[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i));
            w[i] = _mm_shuffle_epi8(w[i], big_endian);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            __m128i& now = w[i % 4];
            __m128i sum =
                _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) {
                const __m128i &next = w[(i + 1) % 4], &third = w[(i + 2) % 4], &last = w[(i + 3) % 4];
                now = _mm_add_epi32(_mm_sha256msg1_epu32(now, next), _mm_alignr_epi8(last, third, 4));
                now = _mm_sha256msg2_epu32(now, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#endif

Compress choose() {
#if defined(__x86_64__)
    if (cpu().sha256) return compress_ni;
#endif
    return sha256_compress_plain;
}

void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
    static const Compress chosen = choose();
    chosen(state, data, blocks);
}

}  // namespace

void Sha256::update(const void* data, size_t size) {
    if (size == 0) return;  // data may be null then
    const auto* bytes = static_cast<const uint8_t*>(data);
    size_t waiting = size_ % 64;
    size_ += size;
    if (waiting != 0) {
        size_t taken = std::min(64 - waiting, size);
        std::memcpy(tail_.data() + waiting, bytes, taken);
        bytes += taken, size -= taken;
        if (waiting + taken < 64) return;
        compress(state_.data(), tail_.data(), 1);
    }
    if (size >= 64) compress(state_.data(), bytes, size / 64);
    std::memcpy(tail_.data(), bytes + size / 64 * 64, size % 64);
}

Digest Sha256::finish() {
    uint8_t padded[128] = {};  // the waiting bytes, 0x80, zeros, and the length in bits, big-endian
    size_t waiting = size_ % 64;
    std::memcpy(padded, tail_.data(), waiting);
    padded[waiting] = 0x80;
    size_t padded_size = waiting < 56 ? 64 : 128;
    for (int i = 0; i < 8; ++i) padded[padded_size - 1 - i] = static_cast<uint8_t>(size_ * 8 >> (8 * i));
    compress(state_.data(), padded, padded_size / 64);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) {
        digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
}

Digest sha256(const void* data, size_t size) {
    Sha256 hash;
    hash.update(data, size);
    return hash.finish();
}

}  // namespace moonpool
