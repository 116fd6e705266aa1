// HandedNode: all that a node's successor has to know to go on, as values: what lies where in the arenas,
// what each connection holds, and up to which removal the node is right. docs/takeover.md has the byte table.
//
//     old process: Server::give() -> write() -> memory file + descriptors -> read() -> Server::create(): new
//     one
//
// read() does not trust the file: every length is checked before memory is reserved for it, and check()
// refuses what no node can have (objects that overlap, leases across each other, slots beyond the table), so
// that a description that lies costs the take-over and no byte.
//
// Descriptors travel beside the file, in the order in which the values below take them: for each pool its
// arena; the Unix socket; the TCP sockets; for each connection its socket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/xxh3.hpp"
#include "directory/version.hpp"
#include "memory/allocator.hpp"
#include "wire/access.hpp"
#include "wire/auth.hpp"

namespace moonpool {

inline constexpr uint32_t kHandedVersion = 1;         // another one is refused
inline constexpr uint32_t kHandedMagic = 0x4B54504D;  // "MPTK"

struct HandedObject {
    uint32_t slot = 0;
    bool detached = false;  // removed or replaced, and still pinned
    bool scrubbed = false;
    bool used = false;  // since its soft pin began anew
    uint64_t generation = 0;
    uint64_t last_used = 0;
    uint32_t parent = 0;  // slot; UINT32_MAX: none
    uint64_t parent_generation = 0;
    uint32_t space = 0;
    Extent extent;
    uint32_t crc = 0;
    Version version = 0;
    uint32_t soft_ms = 0;       // of its soft pin; 0: it was put without
    uint32_t soft_left_ms = 0;  // 0: the soft pin has ended
    Hash128 group{};            // zero: none
    std::string name;
};

struct HandedSpace {
    uint32_t id = 0;
    std::string name_space, fingerprint;
};

struct HandedPool {
    std::string tenant, salt;
    uint64_t arena_bytes = 0;
    uint64_t committed_bytes = 0;  // of the start, reserved
    uint64_t generations = 0;      // given so far
    uint64_t uses = 0;             // clock of the table
    std::vector<Extent> absent;    // memory that other tenants have now
    bool all_opened = false;       // absent is of the whole arena
    std::vector<HandedSpace> spaces;
    std::vector<HandedObject> objects;
};

struct HandedPin {
    uint32_t slot = 0;
    uint64_t generation = 0;
};

struct HandedConnection {
    bool proved = false;  // else only its nonce counts
    bool remote = false;
    bool ended = false;  // refused; kept for what its client holds
    Nonce nonce{};
    std::string tenant;
    Access access;
    std::vector<uint32_t> spaces;
    uint32_t last_space = UINT32_MAX;
    std::vector<Extent> leases;
    std::vector<std::pair<uint64_t, std::vector<HandedPin>>> pins;
    std::vector<std::byte> received;  // of frames, and not handled
    std::vector<std::byte> unsent;
};

struct HandedRemoval {
    Hash128 hash{};
    Version version = kNoVersion;
};

struct HandedRange {
    Version applied = kNoVersion, complete_since = kNoVersion;
    std::vector<HandedRemoval> removals;  // in their order
};

struct HandedNode {
    Incarnation incarnation{};
    uint64_t next_pin = 1;
    uint32_t tcp_sockets = 0;
    std::vector<HandedPool> pools;
    std::vector<HandedRange> ranges;
    std::vector<HandedConnection> connections;

    // As many descriptors go with it.
    size_t descriptors() const { return pools.size() + 1 + tcp_sockets + connections.size(); }
    std::vector<std::byte> write() const;
    static Result<HandedNode> read(std::span<const std::byte> bytes);

   private:
    Status check() const;
};

}  // namespace moonpool
