// Addresses: what each client's address holds of the proxy's places and of the bytes of bodies, so that one
// cannot take them all. An IPv6 host has a whole /64 to choose its addresses from: that counts as one. Pure.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>

namespace moonpool::relay {

struct Held {
    size_t connections = 0;
    size_t body_bytes = 0;
};

class Addresses {
   public:
    // Of a connection's peer. What is of neither family (a Unix socket) counts as one address.
    static uint64_t key_of(const sockaddr_storage& peer) {
        if (peer.ss_family == AF_INET) {
            return of_ipv4(reinterpret_cast<const sockaddr_in&>(peer).sin_addr.s_addr);
        }
        if (peer.ss_family != AF_INET6) return 0;
        const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
        uint64_t network;
        uint32_t last;
        std::memcpy(&network, six.s6_addr, sizeof(network));
        std::memcpy(&last, six.s6_addr + 12, sizeof(last));
        return IN6_IS_ADDR_V4MAPPED(&six) ? of_ipv4(last) : network;
    }

    // A connection has come; what it holds is counted in what is returned, until leave().
    Held& come(uint64_t key) {
        Held& held = held_[key];
        ++held.connections;
        return held;
    }
    void leave(uint64_t key) {
        auto it = held_.find(key);
        if (--it->second.connections == 0) held_.erase(it);
    }
    size_t size() const { return held_.size(); }

   private:
    // Beside all networks: in memory an IPv6 network begins with its first octet, and none that sends begins
    // with ff, which is multicast.
    static uint64_t of_ipv4(uint32_t address) {
        uint64_t key = uint64_t{address} << 32;
        std::memset(&key, 0xff, 1);
        return key;
    }

    std::unordered_map<uint64_t, Held> held_;  // its values stay where they are
};

}  // namespace moonpool::relay
