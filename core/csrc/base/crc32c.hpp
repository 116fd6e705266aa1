// CRC-32C (Castagnoli), the checksum of every stored object, alone or fused with the copy that stores it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

// crc = 0 to start; chains: crc32c(crc32c(0, a), b) == crc32c(0, a ‖ b).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// Copies src to dst (which do not overlap) and returns the checksum of what was stored: every source byte is
// loaded once, and the same register goes to dst and into the checksum. So a source that changes meanwhile
// can give torn bytes, but never bytes that do not match their checksum. Chains like crc32c.
uint32_t copy_crc32c(uint32_t crc, void* dst, const void* src, size_t size);

}  // namespace moonpool
