// The MemoryRef of a range of addresses that a caller names: what memory it is, which device, asked of the
// CUDA driver where the process has one, and of the kernel. No caller's word is taken for the kind.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "base/result.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

// kHost, kPinned or kDevice. kInvalidArgument says why there is none: the CPU may not write part of it and
// the driver does not know it, it is managed memory, or it spans two allocations. Opens no CUDA driver.
Result<MemoryRef> describe_memory(uint64_t address, uint64_t bytes);

// The same for the many ranges of one call, whose allocations are asked of the driver once each (some us).
// Host memory is not looked at: it is as the caller says, and so is managed memory, which the CPU reaches.
// One thread, and no longer than the call: memory may be another's afterwards.
class MemoryKinds {
   public:
    // kHost, kPinned or kDevice. kInvalidArgument: it spans two allocations.
    Result<MemoryRef> describe(uint64_t address, uint64_t bytes);

   private:
    struct Known {
        uint64_t end;
        MemoryRef memory;  // of any range in it, but for the range
    };
    std::optional<bool> has_driver_;   // asked for the first range
    std::map<uint64_t, Known> known_;  // by its first address
};

}  // namespace moonpool
