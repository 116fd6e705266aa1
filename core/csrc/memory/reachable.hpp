// Whether the CPU may read and write a range of addresses of this process. What is registered is touched
// later, by copies and on behalf of peers, where a fault would end the process: addresses of a device's
// memory (any GPU's data_ptr()), guard pages and read-only mappings have to be found before.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moonpool {

struct Unreachable {
    uint64_t address;  // the first such, at a page's start unless it is the range's own
    const char* why;   // "nothing is mapped"
};

// Nothing when all of [address, address + length) may be read and written now. A range of a few MiB costs
// some us and gets its pages, larger ones the time to read /proc/self/maps (1 us for each mapping).
std::optional<Unreachable> find_unreachable(uint64_t address, uint64_t length);

}  // namespace moonpool
