#include "store/device/pinned_arena.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace moonpool {

Result<std::shared_ptr<PinnedArena>> PinnedArena::open(std::shared_ptr<const device::Device> device,
                                                       Client& client, const Options& options) {
    Result<std::unique_ptr<OwnArena>> arena = client.own_arena();
    if (!arena) return arena.error();
    return std::shared_ptr<PinnedArena>(new PinnedArena(std::move(device), std::move(*arena), options));
}

PinnedArena::~PinnedArena() {
    if (leaked_) parts_.leak();
    if (leaked_ || !parts_.release()) arena_->leak();
}

ArenaPins PinnedArena::grow(uint64_t bytes) {
    const uint64_t settled = arena_->settled_bytes();
    bytes = std::min(bytes, arena_->size());
    Status grown = parts_.grow(std::min(bytes, settled));
    ArenaPins pins{.pinned_bytes = parts_.bytes(), .arena_bytes = arena_->size(), .why = {}};
    if (!grown) {
        pins.why = grown.error().text;
    } else if (settled < bytes) {
        pins.why =
            "the node has settled no more of its memory yet: it still reserves it, or gathers it into "
            "huge pages";
    }
    return pins;
}

std::optional<OwnArena::Read> PinnedArena::begin(std::string_view holders, const Descriptor& handed) const {
    if (handed.size < options_.object_bytes_min) return std::nullopt;
    std::optional<OwnArena::Read> read = arena_->begin(holders, handed);
    if (!read || !parts_.holds(read->offset, read->bytes)) return std::nullopt;
    return read;
}

ObjectView PinnedArena::view(const Pinned& pinned, size_t i) const {
    struct Owner {
        std::shared_ptr<const PinnedArena> arena;
        std::shared_ptr<const Pin> pin;
    };
    if (!pinned.has(i)) return {};
    const Descriptor& d = pinned.descriptors[i];
    const std::shared_ptr<Pin>& pin = pinned.pin_of(i);
    if (pin->session()->incarnation() != arena_->incarnation()) return {};
    if (d.size < options_.object_bytes_min || !parts_.holds(d.offset, d.size)) return {};
    return {std::make_shared<Owner>(Owner{shared_from_this(), pin}), arena_->data() + d.offset, d.size};
}

// Objects of one call share a pin, which ends with the last view. So those that have none are left out of a
// second pin, and the first one ends.
Result<std::vector<ObjectView>> PinnedArena::views(Client& client,
                                                   std::span<const std::string_view> names) const {
    std::vector<ObjectView> views(names.size());
    std::vector<size_t> places(names.size());
    std::iota(places.begin(), places.end(), 0);
    for (bool last : {false, true}) {
        std::vector<std::string_view> asked;
        for (size_t place : places) asked.push_back(names[place]);
        Result<Pinned> pinned = client.pin_own(asked);
        if (!pinned) return pinned.error();
        bool all_here = true;
        for (size_t i = 0; i < places.size(); ++i) {
            views[places[i]] = view(*pinned, i);
            all_here &= views[places[i]].owner != nullptr || !pinned->has(i);
        }
        if (all_here || last) {
            for (size_t i = 0; i < places.size(); ++i) {
                if (views[places[i]].owner == nullptr) continue;
                const Descriptor& d = pinned->descriptors[i];
                pinned->pin_of(i)->session()->note_read(d.slot, d.size);  // a pin is no use
            }
            break;
        }
        std::erase_if(places, [&](size_t place) { return views[place].owner == nullptr; });
        for (size_t place : places) views[place] = {};
        if (places.empty()) break;
    }
    return views;
}

uint64_t PinnedArena::address(const OwnArena::Read& read) const {
    return reinterpret_cast<uint64_t>(arena_->data()) + read.offset;
}

}  // namespace moonpool
