// The addresses by which masters name each other to nodes and clients (MasterList): bytes of a peer, that a
// process is going to dial.
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "wire/address.hpp"

namespace moonpool {

inline constexpr size_t kMasterAddressMax = 256;

enum class MasterHost { kNone, kLoopback, kOther };

// Numbers are read as the resolver does, which takes "0" for 0.0.0.0.
inline MasterHost kind_of_host(const std::string& host) {
    if (host.empty()) return MasterHost::kNone;
    if (host == "localhost") return MasterHost::kLoopback;
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST;
    hints.ai_socktype = SOCK_STREAM;
    if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return MasterHost::kOther;  // a name
    uint32_t v4 = INADDR_ANY;
    bool is_v4 = found->ai_family == AF_INET;
    in6_addr v6{};
    if (is_v4) {
        v4 = ntohl(reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr.s_addr);
    } else {
        v6 = reinterpret_cast<const sockaddr_in6*>(found->ai_addr)->sin6_addr;
        is_v4 = IN6_IS_ADDR_V4MAPPED(&v6);
        if (is_v4) {
            std::memcpy(&v4, &v6.s6_addr[12], sizeof(v4));
            v4 = ntohl(v4);
        }
    }
    ::freeaddrinfo(found);
    if (is_v4) {
        if (v4 >> 24 == 0 || v4 >> 28 >= 14) return MasterHost::kNone;  // "this" host, multicast, broadcast
        return v4 >> 24 == IN_LOOPBACKNET ? MasterHost::kLoopback : MasterHost::kOther;
    }
    if (IN6_IS_ADDR_UNSPECIFIED(&v6) || IN6_IS_ADDR_MULTICAST(&v6)) return MasterHost::kNone;
    return IN6_IS_ADDR_LOOPBACK(&v6) ? MasterHost::kLoopback : MasterHost::kOther;
}

// host:port that another process may dial: no address that only a listener has, and none that would be
// several in cluster.master.
inline bool is_master_address(std::string_view text) {
    const auto fits = [](char c) { return c > ' ' && c <= '~' && c != ',' && c != ';'; };
    if (text.size() > kMasterAddressMax || !std::ranges::all_of(text, fits)) return false;
    if (kind_of_host(host_of(std::string(text))) == MasterHost::kNone) return false;
    const std::string_view port = text.substr(text.rfind(':') + 1);
    uint16_t number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    return error == std::errc() && end == port.data() + port.size() && number != 0;
}

inline bool is_loopback(const std::string& address) {
    return kind_of_host(host_of(address)) == MasterHost::kLoopback;
}

}  // namespace moonpool
