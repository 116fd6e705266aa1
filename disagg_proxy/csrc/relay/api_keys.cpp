#include "relay/api_keys.hpp"

#include "base/hmac.hpp"
#include "base/sha256.hpp"
#include "http/fields.hpp"

namespace moonpool::relay {

ApiKeys::ApiKeys(const std::vector<std::string>& keys) {
    for (const std::string& key : keys) digests_.push_back(sha256(key.data(), key.size()));
}

bool ApiKeys::fits(std::string_view authorization) const {
    constexpr std::string_view kScheme = "Bearer ";
    if (!http::same_name(authorization.substr(0, kScheme.size()), kScheme)) return false;
    authorization.remove_prefix(kScheme.size());
    auto shown = sha256(authorization.data(), authorization.size());
    bool fits = false;
    for (const auto& digest : digests_) fits |= equal_constant_time(shown, digest);
    return fits;
}

}  // namespace moonpool::relay
