#include "ssd/index.hpp"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace moonpool::ssd {

void Entry::set_text(std::string_view name, std::string_view parent) {
    text = std::make_unique<char[]>(name.size() + parent.size());
    if (!name.empty()) std::memcpy(text.get(), name.data(), name.size());
    if (!parent.empty()) std::memcpy(text.get() + name.size(), parent.data(), parent.size());
    name_bytes = static_cast<uint16_t>(name.size());
    parent_bytes = static_cast<uint16_t>(parent.size());
}

uint32_t Index::find(const Hash128& hash) const {
    auto it = by_hash_.find(hash);
    return it == by_hash_.end() ? kNoEntry : it->second;
}

uint32_t Index::find(uint32_t space, const Hash128& hash, std::string_view name) const {
    uint32_t at = find(hash);
    if (at == kNoEntry || entries_[at].space != space || entries_[at].name() != name) return kNoEntry;
    return at;
}

uint32_t Index::insert(Entry entry) {
    uint32_t at;
    if (!free_.empty()) {
        at = free_.back();
        free_.pop_back();
        entries_[at] = std::move(entry);
    } else {
        at = slots();
        entries_.push_back(std::move(entry));
    }
    by_hash_.emplace(entries_[at].hash, at);
    live_bytes_ += entries_[at].record_bytes;
    object_bytes_ += entries_[at].size;
    if (in_space_.size() <= entries_[at].space) in_space_.resize(entries_[at].space + 1);
    ++in_space_[entries_[at].space];
    if (owner_of_space_.size() <= entries_[at].space) owner_of_space_.resize(entries_[at].space + 1);
    link(at);
    return at;
}

void Index::erase(uint32_t at) {
    Entry& e = entries_[at];
    unlink(at);
    by_hash_.erase(e.hash);
    live_bytes_ -= e.record_bytes;
    object_bytes_ -= e.size;
    --in_space_[e.space];
    e = Entry{};
    free_.push_back(at);
}

void Index::move(uint32_t at, Place place) {
    unlink(at);
    entries_[at].place = place;
    link(at);
}

void Index::sort(const std::vector<uint64_t>& numbers) {
    std::vector<uint32_t> live;
    live.reserve(count());
    for (uint32_t at = 0; at < slots(); ++at) {
        if (entries_[at].sequence != 0) live.push_back(at);
    }
    std::ranges::sort(live, {}, [&](uint32_t at) {
        const Place& place = entries_[at].place;
        return std::tuple(numbers[place.slot], place.block);
    });
    std::ranges::fill(segments_, Segment{});
    std::ranges::fill(owners_, Segment{});
    for (uint32_t at : live) link(at);
}

void Index::set_owner(uint32_t space, uint32_t owner) {
    if (owner_of_space_.size() <= space) owner_of_space_.resize(space + 1);
    if (owners_.size() <= owner) owners_.resize(owner + 1);
    owner_of_space_[space] = owner;
}

void Index::link(uint32_t at) {
    Entry& e = entries_[at];
    Segment& s = segments_[e.place.slot];
    e.newer = kNoEntry;
    e.older = s.newest;
    (s.newest == kNoEntry ? s.oldest : entries_[s.newest].newer) = at;
    s.newest = at;
    s.live_bytes += e.record_bytes;
    Segment& o = owner_of(e);
    e.owner_newer = kNoEntry;
    e.owner_older = o.newest;
    (o.newest == kNoEntry ? o.oldest : entries_[o.newest].owner_newer) = at;
    o.newest = at;
    o.live_bytes += e.record_bytes;
}

void Index::unlink(uint32_t at) {
    Entry& e = entries_[at];
    Segment& s = segments_[e.place.slot];
    (e.older == kNoEntry ? s.oldest : entries_[e.older].newer) = e.newer;
    (e.newer == kNoEntry ? s.newest : entries_[e.newer].older) = e.older;
    s.live_bytes -= e.record_bytes;
    Segment& o = owner_of(e);
    (e.owner_older == kNoEntry ? o.oldest : entries_[e.owner_older].owner_newer) = e.owner_newer;
    (e.owner_newer == kNoEntry ? o.newest : entries_[e.owner_newer].owner_older) = e.owner_older;
    o.live_bytes -= e.record_bytes;
}

bool Index::check_integrity() const {
    uint64_t linked = 0, bytes = 0, object_bytes = 0;
    std::vector<uint32_t> in_space(in_space_.size());
    for (uint32_t segment = 0; segment < segments_.size(); ++segment) {
        uint64_t segment_bytes = 0;
        uint32_t previous = kNoEntry;
        for (uint32_t at = segments_[segment].oldest; at != kNoEntry; at = entries_[at].newer) {
            const Entry& e = entries_[at];
            if (e.sequence == 0 || e.place.slot != segment || e.older != previous) return false;
            if (find(e.space, e.hash, e.name()) != at || ++linked > count()) return false;
            segment_bytes += e.record_bytes;
            ++in_space[e.space];
            object_bytes += e.size;
            previous = at;
        }
        if (previous != segments_[segment].newest || segment_bytes != segments_[segment].live_bytes) {
            return false;
        }
        bytes += segment_bytes;
    }
    return linked == count() && bytes == live_bytes_ && object_bytes == object_bytes_ &&
           in_space == in_space_ && slots() == count() + free_.size() && check_owners();
}

bool Index::check_owners() const {
    uint64_t linked = 0;
    for (uint32_t owner = 0; owner < owners_.size(); ++owner) {
        uint64_t bytes = 0;
        uint32_t previous = kNoEntry;
        for (uint32_t at = owners_[owner].oldest; at != kNoEntry; at = entries_[at].owner_newer) {
            const Entry& e = entries_[at];
            if (e.sequence == 0 || owner_of_space_[e.space] != owner || e.owner_older != previous)
                return false;
            if (++linked > count()) return false;
            bytes += e.record_bytes;
            previous = at;
        }
        if (previous != owners_[owner].newest || bytes != owners_[owner].live_bytes) return false;
    }
    return linked == count();
}

}  // namespace moonpool::ssd
