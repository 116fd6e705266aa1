// KvMover: how the objects of a chunk get from pinned memory of the host into a paged KV cache, and from
// there into a slot of the pinned ring. Two ways:
//
//     KernelMover   objects cross the link whole; a kernel spreads their rows on the card
//     DirectMover   each row crosses the link by itself, where rows are long enough for that
//
// Any thread, one stream a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.hpp"
#include "device/event.hpp"
#include "store/device/copy_job.hpp"

namespace moonpool {

// An object of a chunk: its offset in the slot and in the staging memory, its place in the KV cache, and
// where its bytes lie on the host: in the slot, or in the arena (store/device/pinned_arena.hpp).
struct KvPlace {
    uint32_t offset = 0;
    uint32_t block = 0;
    uint16_t column = 0;
    uint64_t host = 0;  // an address
};

class KvMover {
   public:
    virtual ~KvMover() = default;

    // What it keeps of a slot for itself, before the first object of that many.
    virtual uint64_t head_bytes(size_t objects) const = 0;
    // A lane has staging memory for a slot in each half.
    virtual bool needs_staging() const = 0;

    // Queue the copies of these objects on in.stream; the KV cache is not touched before `after` is over
    // (null: at once). Offsets are those of in.packing.
    virtual Status to_kv(const ChunkInFlight& in, std::span<const KvPlace> objects,
                         const device::Event* after) const = 0;
    virtual Status to_slot(const ChunkInFlight& in, std::span<const KvPlace> objects,
                           const device::Event* after) const = 0;

    // Memory that a card which does not end its work may still read stays allocated.
    virtual void leak() = 0;
};

}  // namespace moonpool
