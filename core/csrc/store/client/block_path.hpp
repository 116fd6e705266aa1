// BlockPath: how the bytes of objects travel between this process and one node, over one session. NodeClient
// keeps names, pins and the order of things; a path moves bytes, and NodeClient never asks which path it has:
// what a path can do beyond moving is a method with a default that says "no".
//
//   paths/arena_path.hpp  a node of this host: its arena and its index are mapped here
//   paths/tcp_path.hpp    a node of another host: READ and PUT frames, one round trip each
//
// A further path is a class and a row of the table in paths/paths.cpp. Any thread may call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "memory/mapping.hpp"
#include "store/client/items.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/shared_index.hpp"
#include "store/shared/space.hpp"

namespace moonpool {

struct ClientOptions;
class Session;

// An object to be read by its name into `parts`, which may be larger than the object.
struct NamedRead {
    enum Outcome : uint8_t {
        kMiss,
        kRead,
        kDamaged,   // the bytes do not match the object's checksum
        kTooSmall,  // `parts` are; nothing was written
        kAskPin,    // this path cannot say: pin the object, then read what was pinned
    };
    std::string_view name;
    std::span<const MemoryRef> parts;
    uint64_t size = 0;  // of the object, unless kMiss or kAskPin
    Outcome outcome = kMiss;
};

// An object that is pinned, and where its bytes go.
struct PinnedRead {
    enum Outcome : uint8_t { kGone, kRead, kDamaged };
    Descriptor descriptor;
    std::span<const MemoryRef> parts;  // at least as many bytes as the object has
    Outcome outcome = kGone;
};

// Which process holds the pin. The pin of another one may end while its object is read.
enum class PinHolder : uint8_t { kThisProcess, kAnotherProcess };

// The memory of a node of this host, mapped apart from a path's own: it does not go with the session.
struct NodeMemory {
    Mapping arena;  // read-only as a whole
    std::shared_ptr<const IndexReader> index;
};

struct PutHow {
    bool replace = false;
    bool ack = true;                    // wait for the node's answer
    int timeout_ms = 0;                 // the longest wait without progress; 0: the session's own
    RangeVersions known{};              // the removals that this put comes after
    const KeyHasher* hasher = nullptr;  // of the names; null: there is one range
    // Where the node knows of later ones the put begins anew, and comes after these. Not where it may have
    // been carried out at another node before: one put would come both before and after a removal.
    bool anew = true;
    // Not where the node cannot compare it with removals: such a put could bring back what was removed.
    bool ordered = false;

    Version known_of(std::string_view name) const {
        return known.count() == 1 ? known.at(0) : known.of((*hasher)(name));
    }
};

class BlockPath {
   public:
    virtual ~BlockPath() = default;

    // How other processes of this host reach the same node: "unix:/run/node.sock", "tcp:10.0.0.7:7720".
    virtual std::string route() const = 0;

    // Whether objects can be put from, and read into, memory of that kind.
    virtual bool moves(MemoryKind kind) const { return reachable_by_cpu(kind); }
    // The items' names fit the node's limits; their memory, and that of reads, is of kinds that the path
    // moves.
    virtual Result<PutReport> put(std::span<const PutItem> items, const PutHow& how) = 0;
    // verify: compare each object with its checksum. A path whose bytes cross a network always does.
    virtual Status read(std::span<NamedRead> reads, bool verify) = 0;
    virtual Status read(std::span<PinnedRead> reads, PinHolder holder, bool verify) = 0;

    // The node's index, mapped here; null: every question is a request.
    virtual const IndexReader* index() const { return nullptr; }
    // The bytes of an object that this process holds pinned; null: they have to be read.
    virtual const std::byte* in_place(const Descriptor& descriptor) const {
        (void)descriptor;
        return nullptr;
    }
    // Fails where the node is not on this host.
    virtual Result<NodeMemory> map_memory() const {
        return Error{Code::kUnavailable, "the memory of " + route() + " is not of this host"};
    }
    // Of objects that read() leaves as kAskPin: how many to pin before they are read.
    virtual size_t pins_at_once() const { return SIZE_MAX; }
    // Gives back what this client would have written next.
    virtual void retire() {}
};

// One row of the table of paths, in the form of a row of the transfer engine's registry (transport::Factory);
// docs/design.md says what each table decides.
struct PathFactory {
    std::string_view name;  // what its routes begin with, before the colon
    void (*set_address)(ClientOptions& options, std::string_view address);  // what stands behind the colon
    std::string (*viable)(const ClientOptions& options);  // why it cannot reach that node; empty: it can
    // Connects the session first.
    Result<std::unique_ptr<BlockPath>> (*make)(Session& session, const ClientOptions& options);
};
// The first that is viable is taken.
std::span<const PathFactory> path_registry();

Result<std::unique_ptr<BlockPath>> open_path(Session& session, const ClientOptions& options);
// Fills in the address of the options from a route. False: no path has such routes.
bool set_route(ClientOptions& options, std::string_view route);

}  // namespace moonpool
