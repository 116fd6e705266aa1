// ManifestReads: memory for what may be the manifests of some keys, as items of a get.
#pragma once

#include <array>
#include <cstddef>
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

}  // namespace moonpool
