// Objects of a node on their way to other nodes: which there are, and a hold on the bytes of some of them
// while a client of this process copies them. Unlike a pin the hold is no use: what is copied elsewhere is
// evicted in the order in which it would have been.
//
// Any thread may make and drop a hold; the node's loop carries both out. The server outlives its holds.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "directory/version.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

class Pool;
class Removals;
class Server;

// An object in memory. last_used: in uses of its tenant so far.
struct HoldingRow {
    uint32_t pool = 0;  // its number among the node's
    uint32_t slot = 0;
    uint64_t generation = 0;
    uint64_t bytes = 0;
    uint64_t last_used = 0;
    uint32_t space = 0;  // its number in the pool
    uint32_t zero = 0;
};
static_assert(sizeof(HoldingRow) == 40, "Python unpacks these rows");

class OutgoingObjects {
   public:
    struct Object {
        size_t row = 0;  // of those that were asked for
        std::string name, parent, group;
        uint32_t soft_ms = 0;
        uint32_t crc = 0;
        // The last removal of its key's range that the object has outlived: its copy comes after that one,
        // and before all later ones. None where the node knows no order of that range: then it is not copied.
        Version after = kNoVersion;
        MemoryRef bytes;
    };

    explicit OutgoingObjects(Server& server) : server_(server) {}
    ~OutgoingObjects();
    OutgoingObjects(const OutgoingObjects&) = delete;

    // Of the rows' space: "tenant 0 namespace 0 fingerprint"; empty: no object is left.
    const std::string& identity() const { return identity_; }
    size_t rows() const { return rows_; }  // that were asked for
    // What has gone since the rows were taken is not among them.
    const std::vector<Object>& objects() const { return objects_; }

   private:
    friend class Server;
    // On the loop, as all below.
    void hold(Pool& pool, std::span<const HoldingRow> rows, const Removals& removals);

    struct Held {
        uint32_t slot;
        uint64_t generation;
    };

    Server& server_;
    Pool* pool_ = nullptr;
    std::string identity_;
    size_t rows_ = 0;
    std::vector<Object> objects_;
    std::vector<Held> held_;
};

}  // namespace moonpool
