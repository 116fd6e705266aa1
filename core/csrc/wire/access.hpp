// Access: what a connection may do, by the secret that its caller proved. The cluster token opens everything.
// A tenant's key opens what clients use, of that tenant alone, and its role says how far.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "wire/auth.hpp"

namespace moonpool {

enum class TenantRole : uint8_t {
    kReader = 0,  // looks up and reads
    kWriter = 1,  // also puts, replaces and removes by name
    kAdmin = 2,   // also lists names
};

inline const char* name_of(TenantRole role) {
    return role == TenantRole::kReader ? "reader" : role == TenantRole::kWriter ? "writer" : "admin";
}

struct Access {
    bool is_cluster = true;  // the cluster token was proved
    TenantRole role = TenantRole::kAdmin;
    Mac key{};  // the digest of the tenant's key that was proved

    bool may_write() const { return is_cluster || role != TenantRole::kReader; }
    bool may_list() const { return is_cluster || role == TenantRole::kAdmin; }
};

// One sentence for the caller: what its key lacks.
inline Error role_lacks(const Access& access, std::string_view tenant, std::string_view what,
                        std::string_view needed) {
    return Error{Code::kAuth, "the key of tenant \"" + std::string(tenant) + "\" has the role " +
                                  name_of(access.role) + ", which may not " + std::string(what) +
                                  "; use a key with the role " + std::string(needed)};
}
inline Error may_not_write(const Access& access, std::string_view tenant) {
    return role_lacks(access, tenant, "put, replace or remove objects", "writer or admin");
}
inline Error may_not_list(const Access& access, std::string_view tenant) {
    return role_lacks(access, tenant, "list objects", "admin");
}
// What a connection hears whose key is no longer in the file of tenants.
inline Error key_withdrawn(std::string_view tenant) {
    return Error{Code::kAuth, "the key of tenant \"" + std::string(tenant) +
                                  "\" by which this connection was opened has been withdrawn, or has another "
                                  "role now"};
}

}  // namespace moonpool
