// SHA-256, by the CPU's instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moonpool {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
   public:
    void update(const void* data, size_t size);
    Digest finish();  // ends this hash; the object may then only be assigned or destroyed

   private:
    std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> tail_;  // the first size_ % 64 bytes wait for a full block
    uint64_t size_ = 0;
};

Digest sha256(const void* data, size_t size);

// The compression function as a CPU without the instructions runs it; here for the test that compares the
// two.
void sha256_compress_plain(uint32_t* state, const uint8_t* data, size_t blocks);

}  // namespace moonpool
