// Holdings: what a node holds, as its master hears it and tells it to drop: rows of the inventory, the load,
// drops. On the store's loop, a piece at a time, because others wait meanwhile; no thread or clock of its
// own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "directory/delta_log.hpp"
#include "store/node/pool.hpp"
#include "store/node/ssd_tier.hpp"
#include "store/node/use_clock.hpp"

namespace moonpool {

class Holdings {
   public:
    using Pools = std::map<std::string, std::unique_ptr<Pool>, std::less<>>;

    Holdings(Pools& pools, SsdTier* ssd) : pools_(pools), ssd_(ssd) {}  // ssd: null: none

    // The next rows of the inventory, from a cursor on: which pool, or behind them which directory of the
    // SSD, and from which slot on. -> the next cursor, 0: the end.
    uint64_t inventory(uint64_t cursor, std::vector<DeltaRow>& rows) const;
    NodeLoad load(uint64_t now_ms);

    // From everywhere at once: what is being written to a disk dies, and so does what is being read from it.
    void drop(const Hash128& hash);
    // The next objects of a pool's memory, or of a disk, from a cursor on. -> the next cursor, 0: the end.
    uint32_t drop_some(Pool& pool, uint32_t cursor);
    uint32_t drop_some_of_disk(size_t device, uint32_t cursor);

   private:
    Pools& pools_;
    SsdTier* ssd_;
    std::map<std::string, UseClock> use_clocks_;
};

}  // namespace moonpool
