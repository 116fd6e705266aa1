// The caller's half of a TCP connection's beginning: connect, and prove on both sides that the cluster token
// is known. What comes back is a socket on which only frames of the chosen service travel.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/result.hpp"
#include "wire/auth.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame.hpp"
#include "wire/secrets.hpp"
#include "wire/tls.hpp"

namespace moonpool {

// What serves a connection: a node's store, an engine, a master towards nodes, clients or its standby.
inline constexpr std::string_view kServiceStore = "store";
inline constexpr std::string_view kServiceEngine = "engine";
inline constexpr std::string_view kServiceMember = "member";
inline constexpr std::string_view kServiceDirectory = "directory";
inline constexpr std::string_view kServiceStandby = "standby";

struct DialOptions {
    std::string address;  // host:port
    Secrets token;
    std::string tenant = "default";
    std::string service;
    int timeout_ms = 2000;                           // for connecting, and then for the whole handshake
    std::string interface;                           // a network device, empty: the route decides
    const std::atomic<bool>* given_up = nullptr;     // set by another thread: dial() fails at once
    std::shared_ptr<const TlsClient> tls = nullptr;  // all that follows is inside TLS; null: plain
    VersionRange versions = kWireVersions;           // of the wire format, that are spoken here
    // Instead of connecting to the address by TCP: the address is then only a name for errors.
    std::function<Result<Fd>()> connect = nullptr;
    std::vector<Fd>* fds = nullptr;  // receives those that come with the WELCOME, on a Unix socket
    bool* refused = nullptr;         // set where the other side answered, and by an ERROR
    std::string* instead = nullptr;  // receives host:port that such an ERROR names, with a proof
};

struct Dialed {
    Fd fd;  // blocking, with timeout_ms as its receive and send timeouts
    std::unique_ptr<TlsStream> tls;
    Incarnation incarnation{};
    // Of the wire format: the highest that both sides speak; by a node that relays, that of its way to the
    // master.
    uint16_t version = kVersion;
    std::vector<std::byte> welcome;  // the service's own part of WELCOME
    std::string peer;
};

Result<Dialed> dial(const DialOptions& options);

// The tenant as the macs of a TCP handshake cover it.
std::string mac_tenant(std::string_view tenant, std::string_view service);

// What the proof of a refusal covers: the other side knows the secret, and has named that address.
std::string mac_instead(std::string_view covered, std::string_view address);

void set_socket_timeouts(int fd, int timeout_ms);

}  // namespace moonpool
