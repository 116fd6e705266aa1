#include "base/hmac.hpp"

#include <algorithm>
#include <array>

namespace moonpool {

Digest hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> message) {
    std::array<uint8_t, 64> padded = {};
    if (key.size() > padded.size()) {
        Digest shortened = sha256(key.data(), key.size());
        std::copy(shortened.begin(), shortened.end(), padded.begin());
    } else {
        std::copy(key.begin(), key.end(), padded.begin());
    }
    std::array<uint8_t, 64> inner_key = padded, outer_key = padded;
    for (uint8_t& byte : inner_key) byte ^= 0x36;
    for (uint8_t& byte : outer_key) byte ^= 0x5c;

    Sha256 inner;
    inner.update(inner_key.data(), inner_key.size());
    inner.update(message.data(), message.size());
    Digest inner_digest = inner.finish();
    Sha256 outer;
    outer.update(outer_key.data(), outer_key.size());
    outer.update(inner_digest.data(), inner_digest.size());
    return outer.finish();
}

bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b) {
    if (a.size() != b.size()) return false;
    uint8_t difference = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        difference |= a[i] ^ b[i];
        asm volatile("" : "+r"(difference));  // keeps the compiler from leaving the loop early
    }
    return difference == 0;
}

}  // namespace moonpool
