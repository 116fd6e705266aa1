// The MemoryRef of a range of addresses that a caller names: what memory it is, which device, asked of the
// CUDA driver where the process has one, and of the kernel. No caller's word is taken for the kind.
#pragma once

#include <cstdint>

#include "base/result.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

// kHost, kPinned or kDevice. kInvalidArgument says why there is none: the CPU may not write part of it and
// the driver does not know it, it is managed memory, or it spans two allocations. Opens no CUDA driver.
Result<MemoryRef> describe_memory(uint64_t address, uint64_t bytes);

}  // namespace moonpool
