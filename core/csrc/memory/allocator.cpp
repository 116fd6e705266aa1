#include "memory/allocator.hpp"

#include <algorithm>

namespace moonpool {

namespace {

// The part of a free extent that starts and ends on multiples of align.
Extent aligned_part(uint64_t offset, uint64_t size, uint64_t align) {
    uint64_t begin = (offset + align - 1) & ~(align - 1);
    uint64_t end = (offset + size) & ~(align - 1);
    return Extent{begin, end > begin ? end - begin : 0};
}

}  // namespace

void ExtentAllocator::grow(uint64_t bytes) {
    uint64_t offset = capacity_;
    capacity_ += bytes;
    if (bytes != 0) free(Extent{offset, bytes});
}

std::optional<Extent> ExtentAllocator::allocate(uint64_t min, uint64_t want, uint64_t align) {
    auto round_up = [align](uint64_t n) { return (n + align - 1) & ~(align - 1); };
    min = round_up(std::max<uint64_t>(min, 1));
    want = std::max(round_up(want), min);

    auto take = [&](std::set<std::pair<uint64_t, uint64_t>>::iterator it, uint64_t size) {
        uint64_t offset = it->second;
        uint64_t extent_size = it->first;
        Extent part = aligned_part(offset, extent_size, align);
        Extent grant{part.offset, std::min(size, part.size)};
        erase(by_offset_.find(offset));
        if (grant.offset > offset) insert(offset, grant.offset - offset);
        if (offset + extent_size > grant.end()) insert(grant.end(), offset + extent_size - grant.end());
        return grant;
    };

    // Best fit: the first few extents of at least `want` bytes; alignment can spoil one of almost equal size.
    int tries = 0;
    for (auto it = by_size_.lower_bound({want, 0}); it != by_size_.end() && tries < 4; ++it, ++tries) {
        if (aligned_part(it->second, it->first, align).size >= want) return take(it, want);
    }
    // Nothing that large: the largest that still serves, so that a fragmented arena goes on in smaller slabs.
    tries = 0;
    for (auto it = by_size_.rbegin(); it != by_size_.rend() && it->first >= min && tries < 4; ++it, ++tries) {
        if (aligned_part(it->second, it->first, align).size >= min) return take(std::prev(it.base()), want);
    }
    return std::nullopt;
}

void ExtentAllocator::free(Extent extent) {
    if (extent.size == 0) return;
    uint64_t offset = extent.offset;
    uint64_t size = extent.size;
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.begin()) {
        auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            offset = previous->first;
            size += previous->second;
            erase(previous);
        }
    }
    if (next != by_offset_.end() && extent.end() == next->first) {
        size += next->second;
        erase(next);
    }
    insert(offset, size);
}

void ExtentAllocator::insert(uint64_t offset, uint64_t size) {
    by_offset_.emplace(offset, size);
    by_size_.emplace(size, offset);
    free_bytes_ += size;
}

void ExtentAllocator::erase(std::map<uint64_t, uint64_t>::iterator it) {
    free_bytes_ -= it->second;
    by_size_.erase({it->second, it->first});
    by_offset_.erase(it);
}

bool ExtentAllocator::check_integrity() const {
    uint64_t total = 0;
    uint64_t previous_end = 0;
    bool first = true;
    for (auto [offset, size] : by_offset_) {
        if (size == 0 || offset + size > capacity_) return false;
        if (!first && offset <= previous_end) return false;
        if (by_size_.count({size, offset}) != 1) return false;
        previous_end = offset + size;
        total += size;
        first = false;
    }
    return total == free_bytes_ && by_size_.size() == by_offset_.size();
}

}  // namespace moonpool
