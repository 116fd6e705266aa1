// The handshake: both sides prove that they know the cluster token, over fresh nonces, before anything else
// is read.
//
//   node   -> client  CHALLENGE  node nonce, incarnation; in its header the versions that the node speaks
//   client -> node    AUTH       tenant, client nonce, mac_client; in its header the version that it took
//   node   -> client  WELCOME    mac_node, ...
//
// mac_client = HMAC-SHA256(token, "moonpool client" | version | node nonce | client nonce | incarnation |
// tenant) mac_node   = HMAC-SHA256(token, "moonpool node"   | version | client nonce | node nonce |
// incarnation | tenant) The role text keeps one side's mac from being played back as the other's.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace moonpool {

using Nonce = std::array<uint8_t, 32>;
using Mac = std::array<uint8_t, 32>;
using Incarnation = std::array<uint8_t, 16>;  // one incarnation of a node process: random, never an address

enum class Role { kClient, kNode };

Nonce random_nonce();
Incarnation random_incarnation();

Mac handshake_mac(Role role, std::string_view token, const Nonce& node_nonce, const Nonce& client_nonce,
                  const Incarnation& incarnation, std::string_view tenant, uint16_t version);

// How a refusal begins that another secret may not get.
inline constexpr std::string_view kWrongToken = "the cluster token is wrong";
inline bool is_wrong_token(const Error& error) {
    return error.code == Code::kAuth && error.text.find(kWrongToken) != std::string::npos;
}

// Which of `secrets` a client proved by that mac; nullptr: none.
const std::string* proved_by(std::string_view mac, const std::vector<std::string>& secrets,
                             const Nonce& node_nonce, const Nonce& client_nonce,
                             const Incarnation& incarnation, std::string_view tenant, uint16_t version);

}  // namespace moonpool
