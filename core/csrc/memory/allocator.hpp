// ExtentAllocator: which byte ranges of an arena are free. Pure bookkeeping, no memory is touched; one
// thread.
//
// Invariants (check_integrity):
//   - free extents do not overlap, do not touch each other (neighbours are merged), and lie below capacity();
//   - by_size_ holds exactly the extents of by_offset_.
// A granted extent may be given back in pieces and in any order: a slab of objects dies object by object.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace moonpool {

struct Extent {
    uint64_t offset = 0;
    uint64_t size = 0;

    uint64_t end() const { return offset + size; }
    friend bool operator==(const Extent&, const Extent&) = default;
};

class ExtentAllocator {
   public:
    // Adds [capacity, capacity + bytes) to the free space: the arena grew.
    void grow(uint64_t bytes);
    // The same, of bytes that are allocated: free() makes them free.
    void grow_allocated(uint64_t bytes) { capacity_ += bytes; }

    // The best fit for `want` bytes, else the largest extent of at least `min` bytes, else nothing. Offset
    // and size are multiples of `align` (a power of two); size is at most `want` rounded up to it.
    std::optional<Extent> allocate(uint64_t min, uint64_t want, uint64_t align);

    // Gives back a range, which must be wholly allocated.
    void free(Extent extent);

    uint64_t capacity() const { return capacity_; }
    uint64_t free_bytes() const { return free_bytes_; }
    uint64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
    uint64_t extents() const { return by_offset_.size(); }

    template <class Visit>
    void for_each(Visit visit) const {
        for (auto [offset, size] : by_offset_) visit(Extent{offset, size});
    }

    bool check_integrity() const;

   private:
    void insert(uint64_t offset, uint64_t size);
    void erase(std::map<uint64_t, uint64_t>::iterator it);

    std::map<uint64_t, uint64_t> by_offset_;           // offset -> size
    std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (size, offset)
    uint64_t capacity_ = 0;
    uint64_t free_bytes_ = 0;
};

}  // namespace moonpool
