// OwnArena: the arena of one life of the own node, for a card that copies objects from where they lie. The
// card is slower than a call, so reading has two halves:
//
//     begin(object) --> the card copies --> end(read): was the object there all the time?
//
// The node is not stopped from giving the memory to another object meanwhile; end() tells.
//
// Mapped once more, apart from the session's path: that mapping becomes writable slab by slab, and goes with
// the session; this one is read-only as a whole, and stays for ever where a card may still read it (leak()).
// Session and mapping live as long as this, so what a node that died had committed stays readable.
//
// Any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/result.hpp"
#include "memory/mapping.hpp"
#include "store/client/session.hpp"
#include "store/shared/descriptor.hpp"
#include "store/shared/shared_index.hpp"

namespace moonpool {

class OwnArena {
   public:
    struct Read {
        uint64_t offset = 0, bytes = 0;  // of the object, in the arena
        IndexHit hit{};
    };

    static Result<std::unique_ptr<OwnArena>> open(std::shared_ptr<Session> session);

    // False: the node has ended, or the connection; another life of it has another arena.
    bool alive() const { return session_->check_alive(); }
    const Incarnation& incarnation() const { return session_->incarnation(); }
    const std::byte* data() const { return mapping_.data(); }
    uint64_t size() const { return mapping_.size(); }
    // From the front on: what may be pinned, as IndexReader says.
    uint64_t settled_bytes() const { return std::min(session_->path().index()->settled_bytes(), size()); }

    // Nothing: the object lies elsewhere, or is gone. holders, handed: as Client::load.
    std::optional<Read> begin(std::string_view holders, const Descriptor& handed) const;
    // False: what was read may be another object's bytes. True counts as a use of the object.
    bool end(const Read& read) const;
    // Tells the node, with the next frame, what was used.
    void flush_reads() const { session_->flush_reads(); }

    void leak() { mapping_.leak(); }

   private:
    OwnArena(std::shared_ptr<Session> session, Mapping mapping)
        : session_(std::move(session)), mapping_(std::move(mapping)) {}

    const std::shared_ptr<Session> session_;
    Mapping mapping_;
};

}  // namespace moonpool
