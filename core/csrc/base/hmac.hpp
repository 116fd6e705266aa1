// HMAC-SHA256 (RFC 2104) for the handshake, and the comparison that goes with it.
#pragma once

#include <cstdint>
#include <span>

#include "base/sha256.hpp"

namespace moonpool {

Digest hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> message);

// The time depends on the lengths only, not on where the bytes differ. Different lengths are never equal.
bool equal_constant_time(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace moonpool
