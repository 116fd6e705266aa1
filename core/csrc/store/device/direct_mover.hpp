// DirectMover: each row of an object crosses the link by itself, in batches of copies between the host and
// the KV cache. For tables whose rows are long: a copy engine reaches the link's speed with pieces of 64 KiB,
// and neither staging memory nor a kernel is needed (layouts that keep all layers of a block together, MLA
// with large blocks).
#pragma once

#include <cstdint>
#include <vector>

#include "store/client/node_client.hpp"
#include "store/device/kv_mover.hpp"

namespace moonpool {

class DirectMover final : public KvMover {
   public:
    // Rows that follow each other in every block count as one. False: one of them is shorter than that.
    static bool fits(const PartTable& table, uint64_t row_bytes_min);
    explicit DirectMover(const PartTable& table);

    uint64_t head_bytes(size_t) const override { return 0; }
    bool needs_staging() const override { return false; }
    Status to_kv(const ChunkInFlight& in, std::span<const KvPlace> objects,
                 const device::Event* after) const override;
    Status to_slot(const ChunkInFlight& in, std::span<const KvPlace> objects,
                   const device::Event* after) const override;
    void leak() override {}

   private:
    enum class Way { kToKv, kToSlot };
    Status copy(const ChunkInFlight& in, std::span<const KvPlace> objects, const device::Event* after,
                Way way) const;

    const std::vector<std::vector<StridedRow>> columns_;
};

}  // namespace moonpool
