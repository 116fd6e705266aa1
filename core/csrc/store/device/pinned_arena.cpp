#include "store/device/pinned_arena.hpp"

#include <algorithm>
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

uint64_t PinnedArena::address(const OwnArena::Read& read) const {
    return reinterpret_cast<uint64_t>(arena_->data()) + read.offset;
}

}  // namespace moonpool
