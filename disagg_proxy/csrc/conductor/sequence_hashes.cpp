#include "conductor/sequence_hashes.hpp"

#include <array>
#include <bit>

#include "base/xxh3.hpp"

namespace moonpool {

static_assert(std::endian::native == std::endian::little);

std::vector<uint64_t> sequence_hashes(std::span<const uint32_t> tokens, uint32_t block_tokens,
                                      std::optional<uint64_t> parent) {
    std::vector<uint64_t> hashes;
    hashes.reserve(tokens.size() / block_tokens);
    for (size_t at = 0; at + block_tokens <= tokens.size(); at += block_tokens) {
        auto block = tokens.subspan(at, block_tokens);
        uint64_t local = xxh3_64(block.data(), block.size_bytes());
        if (parent) {
            const std::array<uint64_t, 2> both{*parent, local};
            local = xxh3_64(both.data(), sizeof(both));
        }
        hashes.push_back(local);
        parent = local;
    }
    return hashes;
}

}  // namespace moonpool
