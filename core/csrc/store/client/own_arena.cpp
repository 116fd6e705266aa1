#include "store/client/own_arena.hpp"

#include "store/client/client.hpp"

namespace moonpool {

Result<std::unique_ptr<OwnArena>> OwnArena::open(std::shared_ptr<Session> session) {
    Result<Mapping> mapping = session->path().map_arena();
    if (!mapping) return mapping.error();
    return std::unique_ptr<OwnArena>(new OwnArena(std::move(session), std::move(*mapping)));
}

std::optional<OwnArena::Read> OwnArena::begin(std::string_view holders, const Descriptor& handed) const {
    std::optional<Descriptor> d = Client::of_own(holders, handed, session_->incarnation());
    if (!d || d->offset > size() || d->size > size() - d->offset) return std::nullopt;
    std::optional<IndexHit> hit = session_->path().index()->at(d->slot, d->generation);
    if (!hit) return std::nullopt;
    return Read{d->offset, d->size, *hit};
}

bool OwnArena::end(const Read& read) const {
    if (!read.hit.still_valid()) return false;
    session_->note_read(read.hit.slot, read.bytes);
    return true;
}

}  // namespace moonpool
