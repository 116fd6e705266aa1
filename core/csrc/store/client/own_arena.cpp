#include "store/client/own_arena.hpp"

#include "store/client/client.hpp"

namespace moonpool {

Result<std::unique_ptr<OwnArena>> OwnArena::open(Session& session) {
    Result<NodeMemory> memory = session.path().map_memory();
    if (!memory) return memory.error();
    Fd process = session.node_process();
    if (!session.check_alive()) {
        return Error{Code::kUnavailable, "the connection to " + session.peer() + " is lost"};
    }
    return std::unique_ptr<OwnArena>(
        new OwnArena(session.incarnation(), std::move(process), std::move(*memory)));
}

std::optional<OwnArena::Read> OwnArena::begin(std::string_view holders, const Descriptor& handed) const {
    std::optional<Descriptor> d = Client::of_own(holders, handed, incarnation_);
    if (!d || d->offset > size() || d->size > size() - d->offset) return std::nullopt;
    std::optional<IndexHit> hit = memory_.index->at(d->slot, d->generation);
    if (!hit) return std::nullopt;
    return Read{d->offset, d->size, *hit};
}

}  // namespace moonpool
