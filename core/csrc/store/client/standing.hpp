// Standing: what lies under a key that may be striped, as a client has read it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "store/client/search_steps.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

enum class Presence : uint8_t { kMiss = 0, kHit = 1, kUnknown = 2 };

struct Standing {
    int64_t size = kMiss;  // as its holder says it
    std::optional<Manifest> manifest{};
};

// bytes: the first kManifestBytes of the object. A manifest by no secret of the cluster is a miss.
inline Standing standing_of(int64_t size, std::span<const std::byte> bytes, const Secrets& secrets,
                            std::string_view name) {
    Standing out{size};
    if (size != static_cast<int64_t>(kManifestBytes)) return out;
    out.manifest = decode_manifest(bytes, secrets, name);
    if (!out.manifest && may_be_manifest(bytes)) out.size = kMiss;
    return out;
}

}  // namespace moonpool
