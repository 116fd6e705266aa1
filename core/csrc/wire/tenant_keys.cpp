#include "wire/tenant_keys.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "base/hmac.hpp"

namespace moonpool {

namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

void TenantKeys::replace(std::vector<TenantRow> rows) {
    auto made = std::make_shared<ByTenant>();
    for (TenantRow& row : rows) {
        std::vector<Key> keys;
        for (std::string& key : row.keys) {
            Mac digest = hmac_sha256(bytes_of("moonpool tenant key"), bytes_of(key));
            keys.push_back({std::move(key), digest});
        }
        (*made)[row.tenant].push_back({row.role, std::move(keys)});
    }
    MutexLock lock(mutex_);
    rows_ = std::move(made);
    version_.fetch_add(1, std::memory_order_acq_rel);
}

bool TenantKeys::stands(std::string_view tenant, const Access& access) const {
    if (access.is_cluster) return true;
    const Rows all = rows();
    auto own = all->find(tenant);
    return own != all->end() && std::ranges::any_of(own->second, [&](const Row& row) {
               return row.role == access.role &&
                      std::ranges::find(row.keys, access.key, &Key::digest) != row.keys.end();
           });
}

std::optional<TenantKeys::Found> TenantKeys::find(std::string_view mac, const Nonce& node_nonce,
                                                  const Nonce& client_nonce, const Incarnation& incarnation,
                                                  std::string_view tenant, std::string_view covered,
                                                  uint16_t version) const {
    const Rows all = rows();
    auto own = all->find(tenant);
    if (own == all->end()) return std::nullopt;
    for (const Row& row : own->second) {
        for (const Key& key : row.keys) {
            Mac expected = handshake_mac(Role::kClient, key.secret, node_nonce, client_nonce, incarnation,
                                         covered, version);
            if (!equal_constant_time(expected, bytes_of(mac))) continue;
            return Found{key.secret, Access{.is_cluster = false, .role = row.role, .key = key.digest}};
        }
    }
    return std::nullopt;
}

bool TenantKeys::has(std::string_view tenant) const { return rows()->contains(tenant); }

bool TenantKeys::empty() const { return rows()->empty(); }

std::optional<Proved> prove_access(std::string_view mac, const Secrets& token, const TenantKeys* tenants,
                                   const Nonce& node_nonce, const Nonce& client_nonce,
                                   const Incarnation& incarnation, std::string_view tenant,
                                   std::string_view covered, uint16_t version) {
    const auto secrets = token.now();
    const std::string* secret =
        proved_by(mac, *secrets, node_nonce, client_nonce, incarnation, covered, version);
    if (secret != nullptr) return Proved{*secret, Access{}};
    if (tenants == nullptr) return std::nullopt;
    auto found = tenants->find(mac, node_nonce, client_nonce, incarnation, tenant, covered, version);
    if (!found) return std::nullopt;
    return Proved{std::move(found->key), found->access};
}

NotProved not_proved(const TenantKeys* tenants, std::string_view tenant, std::string_view remedy) {
    std::string wrong(kWrongToken);
    if (tenants == nullptr || tenants->empty()) {
        std::string text = wrong + "; " + std::string(remedy);
        return {text, text};
    }
    std::string named = "\"" + std::string(tenant.substr(0, 255)) + "\"";
    std::string text = wrong + ", and no key of tenant " + named +
                       " was proved; give the client a key that the file of tenants has for it";
    const char* why = tenants->has(tenant) ? " (the tenant has other keys)" : " (no row has that tenant)";
    return {text, text + why};
}

}  // namespace moonpool
