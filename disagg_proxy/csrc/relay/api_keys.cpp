#include "relay/api_keys.hpp"

#include "base/hmac.hpp"
#include "base/sha256.hpp"
#include "http/fields.hpp"

namespace moonpool::relay {

const ApiKey* ApiKeys::find(std::string_view authorization) const {
    constexpr std::string_view kScheme = "Bearer ";
    if (!http::same_name(authorization.substr(0, kScheme.size()), kScheme)) return nullptr;
    authorization.remove_prefix(kScheme.size());
    Digest shown = sha256(authorization.data(), authorization.size());
    const ApiKey* found = nullptr;
    for (const ApiKey& key : keys_) {
        if (equal_constant_time(shown, key.digest)) found = &key;
    }
    return found;
}

}  // namespace moonpool::relay
