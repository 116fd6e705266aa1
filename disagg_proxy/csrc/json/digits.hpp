// Short decimal numbers eight bytes at a time, without a branch on how many digits there are: in a list of
// token ids that is a coin toss for the branch predictor, and costs more than all else.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moonpool::json {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

inline constexpr ptrdiff_t kWordBytes = 8;

static_assert(std::endian::native == std::endian::little, "the first character is the lowest byte of a word");

inline uint64_t load_word(const char* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// How many characters from the first on are digits, 0 to 8.
inline unsigned digits_in(uint64_t word) {
    constexpr uint64_t kOnes = 0x0101010101010101;
    // The high bit of a byte is set if it is above '9' or below '0'. Carries only reach bytes behind such a
    // one.
    uint64_t others = (word | (word + kOnes * (0x7F - '9')) | (word - kOnes * '0')) & (kOnes * 0x80);
    return static_cast<unsigned>(std::countr_zero(others)) / 8;
}

// The number of the first `digits` characters, 1 to 8.
inline uint32_t number_in(uint64_t word, unsigned digits) {
    word <<= 64 - 8 * digits;  // zeros stand in front: their low halves are those of '0'
    word = (word & 0x0F0F0F0F0F0F0F0F) * (10 * 256 + 1) >> 8;
    word = (word & 0x00FF00FF00FF00FF) * (100 * 65536 + 1) >> 16;
    return static_cast<uint32_t>((word & 0x0000FFFF0000FFFF) * (10000 * (uint64_t{1} << 32) + 1) >> 32);
}

}  // namespace moonpool::json
