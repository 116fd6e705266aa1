// TCP addresses as people write them, "10.0.0.7:7710" or "[fd00::7]:7710", and sockets on them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/result.hpp"

namespace moonpool {

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t size = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
    int family() const { return storage.ss_family; }
};

// Every address that the text names, in the resolver's order. `listening`: to bind to.
Result<std::vector<SocketAddress>> resolve(const std::string& text, bool listening);

// The host in "host:port", without the brackets of an IPv6 address; empty where there is none.
std::string host_of(const std::string& text);

// The addresses of a list: "10.0.0.1:7700,10.0.0.2:7700".
std::vector<std::string> split_addresses(const std::string& list);

std::string to_text(const SocketAddress& address);
std::string local_address(int fd);
std::string peer_address(int fd);

// What one peer has of addresses, in bytes: an IPv4 address, or of IPv6 a /64, of which one host has all.
// Empty: unknown.
std::string network_of(const SocketAddress& address);
std::string peer_network(int fd);

// What every TCP connection of Moonpool has: no delay of small frames, and a dead peer is noticed within
// about 11 s even when nothing is sent (keepalive) or acknowledged (user timeout). `interface` binds to one
// device.
Status prepare_socket(int fd, const std::string& interface = "");

Result<Fd> listen_tcp(const SocketAddress& address, const std::string& text);

// Waits for `events` of a socket, at most until `end`: false when it is over. While it waits it looks at
// `given_up` every kLookMs, and fails with kClosed when that is set; null: the caller never gives up.
using Deadline = std::chrono::steady_clock::time_point;
inline constexpr int kLookMs = 50;
inline int left_ms(Deadline end) {
    auto left = end - std::chrono::steady_clock::now();
    return static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
}
inline Deadline deadline_in(int ms) {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
}
Result<bool> wait_for(int fd, short events, Deadline end, const std::atomic<bool>* given_up);

// Connects within `timeout_ms`, however many addresses the text names; the socket is blocking.
Result<Fd> connect_tcp(const std::string& text, int timeout_ms, const std::string& interface = "",
                       const std::atomic<bool>* given_up = nullptr);

}  // namespace moonpool
