// A save and a load as a connector makes them, with an engine's stream beside: one path through everything in
// core/csrc/device. Mistakes can be planted in it; each is one that a connector could make.
//
//     compute   forward writes `kv` |mark|        an earlier owner writes `other` |mark|         forward
//     reads `other` kernels      wait mark, kernel kv -> half        ...               wait mark, kernel half
//     -> other copies                    wait half, copies half -> slot |end|     copies slot -> half thread
//     wait end, read slot    write slots      wait the last end
//
// Objects go in groups of one slot each; the groups take the halves of the staging buffer in turn.
#pragma once

#include <set>

#include "bed.hpp"
#include "device/objects_kernel.hpp"
#include "device/pinned_ring.hpp"
#include "device/staging.hpp"
#include "kv_cache.hpp"

namespace moonpool::testing {

// Without the kernel each row goes by itself, between a slot and the blocks:
//
//     copies    wait mark, batch kv -> slot |end|      fill slot, wait mark, batch slot -> other |end|
enum class Way { kKernel, kDirect };

enum class Mistake {
    kSaveDoesNotWait,    // for the forward that computes the blocks
    kLoadDoesNotWait,    // for earlier writes to the blocks
    kSourceAtAnyTime,    // a copy out of the staging buffer, which a kernel writes; out of blocks
    kEndBeforeCopy,      // the event of a save is recorded before its copies are queued
    kEndBeforeKernel,    // the event of a load is recorded before its kernels, or rows, are queued
    kSlotWithoutStream,  // a slot is given back while a copy reads it
    kKernelBeforeCopy,   // a kernel does not wait for the copy that fills its half
    kHalfOverwritten,    // a copy does not wait for the kernel that reads the half
    kEndNotAwaited,      // a save reads its slots at once
};

class Scenario {
   public:
    explicit Scenario(std::set<Mistake> mistakes = {}, int timeout_ms = 10000, Way way = Way::kKernel)
        : mistakes_(std::move(mistakes)), timeout_ms_(timeout_ms), way_(way) {}

    // -> every byte is where it belongs. An error: a call failed, or did not end in time. After both, all is
    // given back that a card which works gives back.
    Result<bool> run(const std::shared_ptr<device::Device>& device);

   private:
    struct Parts;
    // From the forward that writes `kv` to what was saved of it, and into `other`; the last end is queued.
    Status move_by_kernel(Parts& parts);
    Status move_directly(Parts& parts);
    bool with(Mistake mistake) const { return mistakes_.count(mistake) != 0; }

    std::set<Mistake> mistakes_;
    int timeout_ms_;
    Way way_;
};

}  // namespace moonpool::testing
