// Leases: memory that writers hold. A lease is a range in which one client places objects, commits them one
// by one, and which it gives back as a whole.
//
// Invariants (check_integrity):
//   - open leases are disjoint, from each other and from the free extents;
//   - `committed` holds the live objects inside the lease, by offset, disjoint.
// While a lease is open, all of it stays out of the allocator: the memory of an object that dies in it comes
// back when the lease closes. Else a second lease could lie across the first, and closing either would take
// memory from the other.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "memory/allocator.hpp"

namespace moonpool {

class Leases {
   public:
    explicit Leases(ExtentAllocator& allocator) : allocator_(allocator) {}

    // See ExtentAllocator::allocate.
    std::optional<Extent> open(uint64_t min, uint64_t want, uint64_t align);

    // One that another process opened. The allocator has none of it; commit() tells of its objects.
    void adopt(Extent extent) { open_.emplace(extent.offset, Lease{extent, {}}); }

    // Everything in it but live objects becomes free.
    void close(uint64_t offset);

    // An object was written there. False when no open lease holds all of it, or another object has some of
    // it.
    bool commit(Extent extent);

    // The memory of a dead object.
    void free(Extent extent);

    bool inside_open(Extent extent) const;
    bool check_integrity() const;

   private:
    struct Lease {
        Extent extent;
        std::map<uint64_t, uint64_t> committed;  // offset -> end
    };
    const Lease* holding(Extent extent) const;
    Lease* holding(Extent extent) { return const_cast<Lease*>(std::as_const(*this).holding(extent)); }

    ExtentAllocator& allocator_;
    std::map<uint64_t, Lease> open_;  // by offset
};

}  // namespace moonpool
