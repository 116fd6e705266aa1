// Recovery: what a log's file holds, by its segments' headers, and their summaries where they were sealed.
//
//   floor = the highest tail that anything names; what lies below it is free
//   of each key the record with the highest version counts, of one version that with the highest sequence,
//   unless a removal names its sequence
//   a number missing between floor and the newest means a segment that cannot be read: it may have held
//   removals, so nothing older than it is believed
#pragma once

#include <cstdint>
#include <vector>

#include "ssd/index.hpp"
#include "ssd/record.hpp"

namespace moonpool::ssd {

struct Recovery {
    std::vector<uint64_t> numbers;  // of each slot; 0: free
    uint64_t next_number = 0;
    // More is void than the tails on the disk say, because something could not be read. A tail is to be
    // written: the next start may be able to read it, and what is removed until then has no record of its
    // removal.
    bool tail_is_due = false;
    uint64_t sequence_max = 0;
    uint64_t scanned = 0;  // segments that were read whole, not by their summary
    uint64_t damaged = 0;  // segments that could not be read
    uint64_t bytes_read = 0;
    // Sequences of records that no removal names and that count no more: they lost to an older one of a
    // higher version, or the index has no room for them. Each is to be removed, or it would count again once
    // that one has gone, or there is room.
    std::vector<uint64_t> unnamed;
};

// `space` gives the number of a space by its identity. Reads with so many threads.
using SpaceOf = std::function<uint32_t(std::string_view identity)>;
inline constexpr uint32_t kRecoveryThreads = 8;
Recovery recover(File& file, const Superblock& superblock, uint32_t slots, uint32_t records_max, Index& index,
                 const SpaceOf& space, uint32_t threads = kRecoveryThreads);

}  // namespace moonpool::ssd
