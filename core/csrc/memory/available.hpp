// How much memory this process may still take before the kernel ends a process for it: the machine's, and
// that of each control group (v1 and v2) that holds this process. A pure function of files below a root, so
// that tests describe machines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moonpool {

struct AvailableMemory {
    uint64_t available_bytes =
        0;                     // what can be had without swapping, page cache that can be dropped included
    uint64_t total_bytes = 0;  // what the machine has, or the smallest limit above this process
    // Which of them leaves the least: "the machine", or "the control group /path".
    std::string limited_by;
};

// Nothing where `root`/proc/meminfo cannot be read. Takes some 100 us: once per allocation, not per transfer.
std::optional<AvailableMemory> available_memory(const std::string& root = "");

}  // namespace moonpool
