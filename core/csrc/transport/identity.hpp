// What an engine says of itself, and what the transports' targets need of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace moonpool::transport {

struct Identity {
    std::string name;
    std::string tenant;
    SegmentId segment{};
    std::string host_id;
    std::string boot_id;
    std::string shm_socket;
    std::array<uint8_t, 32> shm_cookie{};
    std::string address;  // where others reach us
};

// The half of an engine that serves its peers; implemented by the engine, called on I/O threads.
struct Served {
    const Identity& identity;
    RegionTable& regions;
    Counters& counters;
    std::function<Status(const std::string& peer, std::span<const std::byte> message)> deliver;
};

// "" where the kernel does not tell: then no two processes are on one host.
std::string read_boot_id();

}  // namespace moonpool::transport
