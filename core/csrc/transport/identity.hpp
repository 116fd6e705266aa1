// What an engine says of itself: Identity, what it is; PeerInfo, what it says in the handshake.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/opened_file.hpp"
#include "wire/version_range.hpp"

namespace moonpool::transport {

// Those of the engine's frames that this release speaks. WELCOME and HELLO say them, and both sides take the
// highest in common (wire/version_range.hpp).
inline constexpr uint16_t kEngineVersion = 3;  // the newest
inline constexpr VersionRange kEngineVersions{1, kEngineVersion};
inline constexpr const char* kEngineFormat = "the transfer engine's format";

using SegmentId = std::array<uint8_t, 16>;  // one life of an engine: random, never an address

struct Identity {
    std::string name;
    std::string tenant;
    SegmentId segment{};
    std::string host_id;
    std::string boot_id;  // empty: the kernel does not tell it
};

// What a transport of one host says in the handshake: where initiators prove themselves.
struct HostOffer {
    std::string socket;  // abstract Unix socket, empty: none
    std::array<uint8_t, 32> cookie{};
};

// What a peer's engine says of itself in the handshake. What its transports need of it they fill in by
// Transport::offer().
struct PeerInfo {
    VersionRange versions = kEngineVersions;  // of the engine's format, that it speaks
    uint16_t version = 0;  // of these the one that both sides take, 0: none, or of no handshake
    std::string address;   // as the user gave it
    std::string name;
    SegmentId segment{};
    std::string host_id;
    std::string boot_id;
    HostOffer shm;
    HostOffer cuda_ipc;
    std::shared_ptr<io::OpenedFile> file;  // not null: it is a file, and no engine answers for it
    // What further transports say, in a form of their own, by their names in the registry.
    std::map<std::string, std::vector<std::byte>, std::less<>> offers;
};

// "" where the kernel does not tell: then no two processes are on one host.
std::string read_boot_id();

}  // namespace moonpool::transport
