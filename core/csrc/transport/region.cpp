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
    const std::shared_ptr<Region>* clash = regions_->overlapping(address, length);
    if (clash != nullptr) {
        return Error{Code::kInvalidArgument, "the region " + range_text(address, length) + " overlaps " +
                                                 range_text((*clash)->address, (*clash)->length) +
                                                 ", which is registered; deregister that one first"};
    }
    auto region = std::make_shared<Region>();
    region->id = next_id_++;
    region->address = address;
    region->length = length;
    region->location = location;
    static_cast<RegionMemory&>(*region) = std::move(memory);
    if (region->on_card()) ever_on_card_ = true;
    own_regions().add(region);
    addresses_[region->id] = address;
    note(*region, true);
    return region;
}

Result<std::shared_ptr<Region>> RegionTable::remove(uint64_t address) {
    MutexLock lock(mutex_);
    const std::shared_ptr<Region>* found = regions_->at(address);
    if (found == nullptr) {
        char text[32];
        std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
        return Error{Code::kInvalidArgument, std::string("no region is registered at ") + text};
    }
    std::shared_ptr<Region> region = *found;
    own_regions().remove(address);
    addresses_.erase(region->id);
    note(*region, false);
    region->close();
    return region;
}

// The tree, to be changed. One that all() gave away and that is still in use stays as it is.
Regions& RegionTable::own_regions() {
    if (!is_only(regions_)) regions_ = std::make_shared<Regions>(*regions_);
    return *regions_;
}

void RegionTable::note(const Region& region, bool added) {
    ++edition_;
    log_.push_back({region.id, region.address, added});
    if (log_.size() > kChangesKept) log_.pop_front();
}

RegionChanges RegionTable::changes(uint64_t since) const {
    MutexLock lock(mutex_);
    RegionChanges changes;
    changes.edition = edition_;
    if (since == 0 || since > edition_ || edition_ - since > log_.size()) {
        changes.added = regions_->list();
        return changes;
    }
    changes.whole = false;
    for (size_t i = log_.size() - (edition_ - since); i < log_.size(); ++i) {
        const Change& change = log_[i];
        if (!change.added) {
            changes.removed.push_back({change.id, change.address});
        } else if (addresses_.contains(change.id)) {
            changes.added.push_back(*regions_->at(change.address));
        }
    }
    std::ranges::sort(changes.added, {}, [](const auto& region) { return region->address; });
    return changes;
}

std::shared_ptr<const Regions> RegionTable::all() const {
    MutexLock lock(mutex_);
    return regions_;
}

std::shared_ptr<Region> RegionTable::by_id(uint64_t id) const {
    MutexLock lock(mutex_);
    auto found = addresses_.find(id);
    return found == addresses_.end() ? nullptr : *regions_->at(found->second);
}

bool RegionTable::check_integrity() const {
    MutexLock lock(mutex_);
    uint64_t end = 0;
    RegionList list = regions_->list();
    for (const auto& region : list) {
        if (region->length == 0 || region->address < end || region->closing()) return false;
        if ((region->kind == MemoryKind::kHostArena) != (region->memory != nullptr)) return false;
        if ((region->kind == MemoryKind::kDevice) != region->on_card()) return false;
        auto named = addresses_.find(region->id);
        if (named == addresses_.end() || named->second != region->address) return false;
        const std::shared_ptr<Region>* found = regions_->find(region->address, region->length);
        if (found == nullptr || *found != region) return false;
        end = region->address + region->length;
    }
    return list.size() == regions_->size() && list.size() == addresses_.size() && list.size() <= kRegionsMax;
}

}  // namespace moonpool::transport
