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
#include "directory/ranges.hpp"
#include "store/node/pool.hpp"
#include "store/node/removals.hpp"
#include "store/node/ssd_tier.hpp"
#include "store/node/use_clock.hpp"

namespace moonpool {

class Holdings {
   public:
    using Pools = std::map<std::string, std::unique_ptr<Pool>, std::less<>>;

    // ssd: null: none
    Holdings(Pools& pools, SsdTier* ssd, Removals& removals)
        : pools_(pools), ssd_(ssd), removals_(removals) {}

    // The next rows of the inventory, from a cursor on: which pool, or behind them which directory of the
    // SSD, and from which slot on; those of that range. -> the next cursor, 0: the end.
    uint64_t inventory(uint64_t cursor, std::vector<DeltaRow>& rows, const Range& range = {}) const;
    NodeLoad load(uint64_t now_ms);

    // Whether there is nothing.
    bool empty() const;

    // From everywhere at once: what is being written to a disk dies, and so does what is being read from it.
    // A copy that is not older stays, and is told anew: the master took it for an older one.
    void drop(const Drop& drop);
    // The next objects of a pool's memory, or of a disk, from a cursor on, that are of the range and older.
    // -> the next cursor, 0: the end.
    uint32_t drop_some(Pool& pool, uint32_t cursor, Version before, const Range& range = {});
    uint32_t drop_some_of_disk(size_t device, uint32_t cursor, Version before, const Range& range = {});

   private:
    Pools& pools_;
    SsdTier* ssd_;
    Removals& removals_;
    std::map<std::string, UseClock> use_clocks_;
};

}  // namespace moonpool
