// A key is a space (tenant, namespace, fingerprint) and a name. Its hash places it in tables and, later, in
// the directory's shards: h = XXH3-128(tenant 0 namespace 0 fingerprint name), seed 0. Test vectors:
// docs/keys.md. A tenant may have a salt: h = XXH3-128(tenant 1 salt 0 namespace 0 fingerprint name).
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "base/xxh3.hpp"

namespace moonpool {

class KeyHasher {
   public:
    KeyHasher() = default;
    // salt: of the tenant, known to its clients and nodes alone; empty: it has none. Without it no other
    // tenant can say which hash a key has, so none can ask a master for it, or have it removed.
    KeyHasher(std::string_view tenant, std::string_view name_space, std::string_view fingerprint,
              std::string_view salt = {}) {
        prefix_.append(tenant);
        if (!salt.empty()) prefix_.append(1, kSaltMark).append(salt);
        prefix_.push_back('\0');
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

    // What names the space: "tenant 0 namespace 0 fingerprint", with a salt "tenant 1 salt 0 ...".
    const std::string& identity() const { return prefix_; }

   private:
    static constexpr char kSaltMark = 1;

    std::string prefix_;
};

}  // namespace moonpool
