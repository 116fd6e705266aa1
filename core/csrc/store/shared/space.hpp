// A key is a space (tenant, namespace, fingerprint) and a name. Its hash places it in tables and, later, in
// the directory's shards: h = XXH3-128(tenant 0 namespace 0 fingerprint name), seed 0. Test vectors:
// docs/keys.md.
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "base/xxh3.hpp"

namespace moonpool {

class KeyHasher {
   public:
    KeyHasher() = default;
    KeyHasher(std::string_view tenant, std::string_view name_space, std::string_view fingerprint) {
        prefix_.append(tenant).push_back('\0');
        prefix_.append(name_space).push_back('\0');
        prefix_.append(fingerprint);
    }

    Hash128 operator()(std::string_view name) const {
        char buffer[512];
        size_t size = prefix_.size() + name.size();
        if (size <= sizeof(buffer)) {
            std::memcpy(buffer, prefix_.data(), prefix_.size());
            std::memcpy(buffer + prefix_.size(), name.data(), name.size());
            return xxh3_128(buffer, size);
        }
        std::string whole = prefix_;
        whole.append(name);
        return xxh3_128(whole.data(), whole.size());
    }

    // What names the space: "tenant 0 namespace 0 fingerprint".
    const std::string& identity() const { return prefix_; }

   private:
    std::string prefix_;
};

}  // namespace moonpool
