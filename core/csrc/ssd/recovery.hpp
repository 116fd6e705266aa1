// Recovery: what a log's file holds, by its segments' headers, and their summaries where they were sealed.
//
//   floor = the highest tail that anything names; what lies below it is free
//   of each key the record with the highest sequence counts, unless a removal names its sequence
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
    uint64_t sequence_max = 0;
    uint64_t scanned = 0;  // segments that were read whole, not by their summary
    uint64_t damaged = 0;  // segments that could not be read
    uint64_t bytes_read = 0;
};

// `space` gives the number of a space by its identity. Reads with several threads.
using SpaceOf = std::function<uint32_t(std::string_view identity)>;
Recovery recover(File& file, const Superblock& superblock, uint32_t slots, uint32_t records_max, Index& index,
                 const SpaceOf& space);

}  // namespace moonpool::ssd
