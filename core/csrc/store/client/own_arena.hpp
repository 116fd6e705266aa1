// OwnArena: the arena of one life of the own node, for a card that copies objects from where they lie. The
// card is slower than a call, so reading has two halves:
//
//     begin(object) --> the card copies --> end(read): was the object there all the time?
//
// The node is not stopped from giving the memory to another object meanwhile; end() tells.
//
// Mapped once more, apart from the session's path: that mapping becomes writable slab by slab, and goes with
// the session; this one is read-only as a whole, and stays for ever where a card may still read it (leak()).
// Mapping and index live as long as this, so what a node that died had committed stays readable. It holds no
// session: one that an answer in too long a time has ended would keep its connection, and the node what is
// pinned and leased over that. Client has the session of the moment: it says whether the node lives on
// (lives()), and tells it what was read (note_reads()).
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

#include "base/fd.hpp"
#include "base/peer_process.hpp"
#include "base/result.hpp"
#include "store/client/block_path.hpp"
#include "store/client/session.hpp"

namespace moonpool {

class OwnArena {
   public:
    struct Read {
        uint64_t offset = 0, bytes = 0;  // of the object, in the arena
        IndexHit hit{};
    };

    static Result<std::unique_ptr<OwnArena>> open(Session& session);

    // Another life of the node has another arena.
    const Incarnation& incarnation() const { return incarnation_; }
    // Another process serves it: the arena is the same, and its new index has to be mapped.
    bool superseded() const { return memory_.index->superseded(); }
    // Whether the node's process lives, in which the node may have ended; false where that is not known.
    bool process_runs() const { return process_.valid() && !has_ended(process_); }
    const std::byte* data() const { return memory_.arena.data(); }
    uint64_t size() const { return memory_.arena.size(); }
    // From the front on: what may be pinned, as IndexReader says.
    uint64_t settled_bytes() const { return std::min(memory_.index->settled_bytes(), size()); }

    // Nothing: the object lies elsewhere, or is gone. holders, handed: as Client::load.
    std::optional<Read> begin(std::string_view holders, const Descriptor& handed) const;
    // False: what was read may be another object's bytes.
    static bool end(const Read& read) { return read.hit.still_valid(); }

    void leak() { memory_.arena.leak(); }

   private:
    OwnArena(const Incarnation& incarnation, Fd process, NodeMemory memory)
        : incarnation_(incarnation), process_(std::move(process)), memory_(std::move(memory)) {}

    const Incarnation incarnation_;
    const Fd process_;  // the node's, where it is another one and the kernel tells
    NodeMemory memory_;
};

}  // namespace moonpool
