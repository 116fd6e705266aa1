#include "transport/region.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace moonpool::transport {

namespace {

std::string range_text(uint64_t address, uint64_t length) {
    char text[64];
    std::snprintf(text, sizeof(text), "0x%llx + %llu", static_cast<unsigned long long>(address),
                  static_cast<unsigned long long>(length));
    return text;
}

}  // namespace

const std::shared_ptr<Region>* find_region(const Regions& regions, uint64_t address, uint64_t bytes) {
    auto it = std::ranges::upper_bound(regions, address, {}, [](const auto& r) { return r->address; });
    if (it == regions.begin()) return nullptr;
    --it;
    return (*it)->contains(address, bytes) ? &*it : nullptr;
}

Result<std::shared_ptr<Region>> RegionTable::add(uint64_t address, uint64_t length,
                                                 const std::string& location, RegionMemory memory) {
    if (address == 0 || length == 0 || address + length < address) {
        return Error{Code::kInvalidArgument,
                     "a region needs an address and a length: " + range_text(address, length) + " is none"};
    }
    if (location.size() > kLocationBytesMax) {
        return Error{Code::kTooLarge, "a location has at most " + std::to_string(kLocationBytesMax) +
                                          " bytes; \"cpu:0\" is an example"};
    }
    if (!is_utf8(location)) {  // peers could read none of the regions
        return Error{Code::kInvalidArgument, "a location must be UTF-8; \"cpu:0\" is an example"};
    }
    MutexLock lock(mutex_);
    if (regions_->size() >= kRegionsMax) {
        return Error{Code::kTooLarge, "this engine already has " + std::to_string(kRegionsMax) +
                                          " regions, the limit; register larger ranges"};
    }
    auto next = std::ranges::upper_bound(*regions_, address, {}, [](const auto& r) { return r->address; });
    const Region* clash = nullptr;
    if (next != regions_->end() && (*next)->address < address + length) clash = next->get();
    if (next != regions_->begin()) {
        const Region& before = **std::prev(next);
        if (before.address + before.length > address) clash = &before;
    }
    if (clash != nullptr) {
        return Error{Code::kInvalidArgument, "the region " + range_text(address, length) + " overlaps " +
                                                 range_text(clash->address, clash->length) +
                                                 ", which is registered; deregister that one first"};
    }
    auto region = std::make_shared<Region>();
    region->id = next_id_++;
    region->address = address;
    region->length = length;
    region->location = location;
    static_cast<RegionMemory&>(*region) = std::move(memory);
    if (region->on_card()) ever_on_card_ = true;
    auto regions = std::make_shared<Regions>(*regions_);
    regions->insert(regions->begin() + (next - regions_->begin()), region);
    regions_ = std::move(regions);
    return region;
}

Result<std::shared_ptr<Region>> RegionTable::remove(uint64_t address) {
    MutexLock lock(mutex_);
    auto it = std::ranges::lower_bound(*regions_, address, {}, [](const auto& r) { return r->address; });
    if (it == regions_->end() || (*it)->address != address) {
        char text[32];
        std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
        return Error{Code::kInvalidArgument, std::string("no region is registered at ") + text};
    }
    std::shared_ptr<Region> region = *it;
    auto regions = std::make_shared<Regions>(*regions_);
    regions->erase(regions->begin() + (it - regions_->begin()));
    regions_ = std::move(regions);
    region->close();
    return region;
}

std::shared_ptr<const Regions> RegionTable::all() const {
    MutexLock lock(mutex_);
    return regions_;
}

std::shared_ptr<Region> RegionTable::by_id(uint64_t id) const {
    std::shared_ptr<const Regions> regions = all();
    for (const auto& region : *regions) {
        if (region->id == id) return region;
    }
    return nullptr;
}

bool RegionTable::check_integrity() const {
    std::shared_ptr<const Regions> regions = all();
    uint64_t end = 0;
    for (const auto& region : *regions) {
        if (region->length == 0 || region->address < end || region->closing()) return false;
        if ((region->kind == MemoryKind::kHostArena) != (region->memory != nullptr)) return false;
        if ((region->kind == MemoryKind::kDevice) != region->on_card()) return false;
        end = region->address + region->length;
    }
    return regions->size() <= kRegionsMax;
}

}  // namespace moonpool::transport
