// ManifestReads: memory for what may be the manifests of some keys, as items of a get. beginning(): what may
// be one in memory that is there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "store/client/items.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

struct ManifestReads {
    std::vector<std::array<std::byte, kManifestBytes>> bytes;
    std::vector<MemoryRef> parts;
    std::vector<GetItem> items;

    explicit ManifestReads(size_t n) : bytes(n) {
        parts.reserve(n);
        for (auto& row : bytes) parts.push_back(MemoryRef::host(row.data(), row.size()));
    }
    ManifestReads(const ManifestReads&) = delete;
    // Of as many keys as there is memory for, in their order.
    void add(std::string_view name) { items.push_back({name, {&parts[items.size()], 1}}); }
};

// The first bytes of an object, wherever its parts lie.
inline std::array<std::byte, kManifestBytes> beginning(std::span<const MemoryRef> parts) {
    std::array<std::byte, kManifestBytes> bytes{};
    size_t at = 0;
    for (const MemoryRef& part : parts) {
        size_t n = std::min<uint64_t>(bytes.size() - at, part.bytes);
        if (n != 0) std::memcpy(bytes.data() + at, part.data(), n);
        at += n;
    }
    return bytes;
}

}  // namespace moonpool
