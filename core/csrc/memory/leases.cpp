#include "memory/leases.hpp"

#include <iterator>

namespace moonpool {

std::optional<Extent> Leases::open(uint64_t min, uint64_t want, uint64_t align) {
    std::optional<Extent> extent = allocator_.allocate(min, want, align);
    if (extent) open_.emplace(extent->offset, Lease{*extent, {}});
    return extent;
}

void Leases::close(uint64_t offset) {
    auto it = open_.find(offset);
    if (it == open_.end()) return;
    const Lease& lease = it->second;
    uint64_t from = lease.extent.offset;
    for (auto [begin, end] : lease.committed) {
        allocator_.free(Extent{from, begin - from});
        from = end;
    }
    allocator_.free(Extent{from, lease.extent.end() - from});
    open_.erase(it);
}

bool Leases::commit(Extent extent) {
    Lease* lease = holding(extent);
    if (lease == nullptr) return false;
    auto next = lease->committed.lower_bound(extent.offset);
    if (next != lease->committed.end() && next->first < extent.end()) return false;
    if (next != lease->committed.begin() && std::prev(next)->second > extent.offset) return false;
    lease->committed.emplace_hint(next, extent.offset, extent.end());
    return true;
}

void Leases::free(Extent extent) {
    if (extent.size == 0) return;
    Lease* lease = holding(extent);
    if (lease == nullptr) {
        allocator_.free(extent);
        return;
    }
    auto place = lease->committed.find(extent.offset);
    if (place != lease->committed.end() && place->second == extent.end()) lease->committed.erase(place);
}

const Leases::Lease* Leases::holding(Extent extent) const {
    auto it = open_.upper_bound(extent.offset);
    if (it == open_.begin()) return nullptr;
    const Lease& lease = std::prev(it)->second;
    bool inside = extent.size <= lease.extent.size && extent.offset <= lease.extent.end() - extent.size;
    return inside ? &lease : nullptr;
}

bool Leases::inside_open(Extent extent) const { return extent.size != 0 && holding(extent) != nullptr; }

bool Leases::check_integrity() const {
    uint64_t end = 0;
    bool sound = allocator_.check_integrity();
    for (const auto& [offset, lease] : open_) {
        sound = sound && offset == lease.extent.offset && offset >= end &&
                lease.extent.end() <= allocator_.capacity();
        end = lease.extent.end();
        uint64_t from = offset;
        for (auto [object_begin, object_end] : lease.committed) {
            sound = sound && object_begin >= from && object_end > object_begin && object_end <= end;
            from = object_end;
        }
        const Extent& held = lease.extent;  // clang before 16 captures no structured binding
        allocator_.for_each(
            [&](Extent free) { sound = sound && (free.end() <= held.offset || free.offset >= held.end()); });
    }
    return sound;
}

}  // namespace moonpool
