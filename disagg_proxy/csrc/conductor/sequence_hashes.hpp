// The rolling hashes by which Mooncake's indexer API names blocks (XXH3-64, seed 0, all little-endian):
//     local[i]    = XXH3(tokens of block i as u32)
//     sequence[0] = local[0]
//     sequence[i] = XXH3(sequence[i - 1] ‖ local[i])
// Such a hash stands for the whole prompt up to its block. Unlike our digests (base/digest.hpp) it is no
// proof.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace moonpool {

// Of each full block of block_tokens (> 0) tokens. parent: of the block before the first; none: they begin a
// prompt.
std::vector<uint64_t> sequence_hashes(std::span<const uint32_t> tokens, uint32_t block_tokens,
                                      std::optional<uint64_t> parent);

}  // namespace moonpool
