// What arenas may take of the memory that is available. An arena takes shared memory, which counts for no
// process: when it is more than there is, the kernel ends other processes of the host for it. So a node that
// asks for too much is refused before it reserves anything, and one that finds less than it saw stops early.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"
#include "memory/available.hpp"

namespace moonpool {

// Left to the process itself, to its index (128 bytes for each 4 KiB of a small arena), and to its
// neighbours.
uint64_t kept_free(const AvailableMemory& memory);

// Bytes that arenas may take now, in all.
uint64_t room_for_arenas(const AvailableMemory& memory);

// An error that names what is asked for, what there is and a value that fits. Where the machine does not say
// how much there is, everything fits. option: how the caller gives the size, for example "--dram "; empty
// where there are several sizes.
Status check_room(uint64_t bytes, const std::string& option, const std::string& root = "");

// "21.3 GiB"
std::string size_text(uint64_t bytes);

}  // namespace moonpool
