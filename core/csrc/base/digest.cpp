#include "base/digest.hpp"

#include <bit>
#include <cstring>

#include "base/sha256.hpp"

namespace moonpool {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as they lie in memory");

void block_digests(std::span<const uint32_t> tokens, uint32_t block_tokens, std::span<const uint8_t> previous,
                   uint8_t* out) {
    if (block_tokens == 0) return;
    while (tokens.size() >= block_tokens) {
        Sha256 hash;
        hash.update(previous.data(), previous.size());
        hash.update(tokens.data(), size_t{block_tokens} * sizeof(uint32_t));
        Digest digest = hash.finish();
        std::memcpy(out, digest.data(), digest.size());
        previous = {out, digest.size()};
        tokens = tokens.subspan(block_tokens);
        out += digest.size();
    }
}

}  // namespace moonpool
