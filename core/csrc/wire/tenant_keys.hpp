// TenantKeys: the tenants' own keys, as the file of tenants (cluster.tenants_file) has them. A caller for a
// tenant's service proves the cluster token, or a key of that very tenant: the proof covers the tenant's
// name, so that it opens no other, also where two tenants were given one key.
//
// Any thread. The rows are replaced as a whole; each loop that has connections compares version() now and
// then, and ends those whose key no longer stands (stands()).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.hpp"
#include "wire/access.hpp"
#include "wire/auth.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

struct TenantRow {
    std::string tenant;
    TenantRole role = TenantRole::kReader;
    std::vector<std::string> keys;  // one, or two while one replaces the other
};

class TenantKeys {
   public:
    void replace(std::vector<TenantRow> rows);
    uint64_t version() const { return version_.load(std::memory_order_acquire); }

    // Whether a connection that was opened by that access may stay.
    bool stands(std::string_view tenant, const Access& access) const;

    struct Found {
        std::string key;
        Access access;
    };
    // Which key of the tenant the client proved by that mac; nothing: none.
    std::optional<Found> find(std::string_view mac, const Nonce& node_nonce, const Nonce& client_nonce,
                              const Incarnation& incarnation, std::string_view tenant,
                              std::string_view covered, uint16_t version) const;
    bool has(std::string_view tenant) const;  // a row of that tenant
    bool empty() const;

   private:
    struct Key {
        std::string secret;
        Mac digest;
    };
    struct Row {
        TenantRole role;
        std::vector<Key> keys;
    };
    // By tenant: a pool may have thousands, and each of a server's connections is looked up when rows change.
    using ByTenant = std::map<std::string, std::vector<Row>, std::less<>>;
    using Rows = std::shared_ptr<const ByTenant>;
    Rows rows() const {
        MutexLock lock(mutex_);
        return rows_;
    }

    mutable Mutex mutex_;
    Rows rows_ GUARDED_BY(mutex_) = std::make_shared<const ByTenant>();
    std::atomic<uint64_t> version_{0};
};

// What a caller has proved, and the secret by which this side answers.
struct Proved {
    std::string secret;
    Access access;
};
// covered: the tenant as the proof covers it, with the service where there is one. tenants: null: there are
// no tenants' keys. Nothing: neither the cluster token nor a key of that tenant was proved.
std::optional<Proved> prove_access(std::string_view mac, const Secrets& token, const TenantKeys* tenants,
                                   const Nonce& node_nonce, const Nonce& client_nonce,
                                   const Incarnation& incarnation, std::string_view tenant,
                                   std::string_view covered, uint16_t version);

// The refusal of such a caller: what it is told, which is the same for a wrong key and for a tenant that has
// none, so that no stranger learns the tenants' names; and what the operator reads. remedy: of a wrong token.
struct NotProved {
    std::string text, noted;
};
NotProved not_proved(const TenantKeys* tenants, std::string_view tenant, std::string_view remedy);

}  // namespace moonpool
