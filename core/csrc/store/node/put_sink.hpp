// PutSink: one PUT frame while its bytes arrive. The rows say what comes; each object's bytes are received
// straight into the arena, in memory that belongs to this connection until it is committed, and their
// checksum is computed piece by piece while they are still in the cache. What finds no room is read and
// forgotten, so that the connection stays in step.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory/allocator.hpp"
#include "store/node/object_table.hpp"
#include "store/shared/messages.hpp"

namespace moonpool {

struct PutRow {
    uint64_t size = 0;
    uint32_t crc = 0;  // as the sender computed it
    std::string name;
    std::string parent;
    RetentionHints hints;
    std::optional<Version> version;  // none: its sender is of the release before
    std::byte* to = nullptr;         // null: the bytes are forgotten
    Extent extent;
    PutOutcome outcome = PutOutcome::kStored;
    uint32_t crc_here = 0;

    // Where `bytes` at `at` of the object go. Null: nowhere, also when they are not wholly inside of the
    // object's memory, whatever was computed before; the object is then refused.
    std::byte* place(uint64_t at, uint64_t bytes) {
        if (to != nullptr && (at > extent.size || bytes > extent.size - at)) {
            to = nullptr;
            outcome = PutOutcome::kRefused;
        }
        return to == nullptr ? nullptr : to + at;
    }
};

class PutSink {
   public:
    uint64_t request_id = 0;
    bool one_way = false;
    bool replace = false;
    uint8_t flags = 0;  // of its head
    uint32_t space = 0;
    std::vector<PutRow> rows;
    std::vector<uint64_t> leases;  // by offset

    bool complete();
    // Where the next bytes go, at most kTurnBytes of them.
    size_t targets(iovec* parts, size_t parts_max);
    void advance(uint64_t n);                         // that many arrived there
    size_t take(const std::byte* data, size_t size);  // arrived elsewhere: copies; how many it took

    static constexpr uint64_t kTurnBytes = 256u << 10;

   private:
    void skip_whole();

    size_t row_ = 0;
    uint64_t done_ = 0;  // of that row
    std::vector<std::byte> forgotten_;
};

}  // namespace moonpool
