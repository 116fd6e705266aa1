#include "base/digest.hpp"

#include <bit>
#include <cstring>

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

Digest chain_seed(std::optional<std::string_view> lora_name, std::optional<std::string_view> cache_salt) {
    constexpr std::string_view kPrefix = "sglang-cache-namespace-v1";
    Sha256 hash;
    hash.update(kPrefix.data(), kPrefix.size());
    for (const auto& part : {lora_name, cache_salt}) {
        uint8_t present = part ? 1 : 0;
        hash.update(&present, 1);
        if (!part) continue;
        uint64_t size = part->size();
        hash.update(&size, sizeof(size));
        hash.update(part->data(), part->size());
    }
    return hash.finish();
}

}  // namespace moonpool
