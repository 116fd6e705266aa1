// CRC-32C (Castagnoli), the checksum of every stored object, alone or fused with the copy that stores it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moonpool {

// crc = 0 to start; chains: crc32c(crc32c(0, a), b) == crc32c(0, a ‖ b).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// Copies src to dst (which do not overlap) and returns the checksum of what was stored: every source byte is
// loaded once, and the same register goes to dst and into the checksum. So a source that changes meanwhile
// can give torn bytes, but never bytes that do not match their checksum. Chains like crc32c.
uint32_t copy_crc32c(uint32_t crc, void* dst, const void* src, size_t size);

// The implementations that this CPU can run, the fastest, which the functions above use, first. For tests and
// benchmarks.
struct Crc32cVariant {
    const char* name;
    uint32_t (*crc32c)(uint32_t crc, const void* data, size_t size);
    uint32_t (*copy_crc32c)(uint32_t crc, void* dst, const void* src, size_t size);
};
std::span<const Crc32cVariant> crc32c_variants();

}  // namespace moonpool
