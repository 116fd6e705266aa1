#include "wire/auth.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <span>

#include "base/hmac.hpp"

namespace moonpool {

namespace {

template <size_t N>
std::array<uint8_t, N> random_bytes() {
    std::array<uint8_t, N> bytes;
    size_t have = 0;
    while (have < N) {
        ssize_t n = ::getrandom(bytes.data() + have, N - have, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) std::abort();  // no kernel that we run on lacks it; a predictable nonce would be worse
        have += static_cast<size_t>(n);
    }
    return bytes;
}

}  // namespace

Nonce random_nonce() { return random_bytes<32>(); }
Incarnation random_incarnation() { return random_bytes<16>(); }

Mac handshake_mac(Role role, std::string_view token, const Nonce& node_nonce, const Nonce& client_nonce,
                  const Incarnation& incarnation, std::string_view tenant, uint16_t version) {
    bool client = role == Role::kClient;
    std::string message = client ? "moonpool client" : "moonpool node";
    auto add = [&message](const auto& bytes) {
        message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    message.push_back(static_cast<char>(version));
    add(client ? node_nonce : client_nonce);
    add(client ? client_nonce : node_nonce);
    add(incarnation);
    message.append(tenant);
    auto view = [](std::string_view text) {
        return std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    };
    return hmac_sha256(view(token), view(message));
}

const std::string* proved_by(std::string_view mac, const std::vector<std::string>& secrets,
                             const Nonce& node_nonce, const Nonce& client_nonce,
                             const Incarnation& incarnation, std::string_view tenant, uint16_t version) {
    std::span<const uint8_t> shown(reinterpret_cast<const uint8_t*>(mac.data()), mac.size());
    for (const std::string& secret : secrets) {
        Mac expected =
            handshake_mac(Role::kClient, secret, node_nonce, client_nonce, incarnation, tenant, version);
        if (equal_constant_time(expected, shown)) return &secret;
    }
    return nullptr;
}

}  // namespace moonpool
