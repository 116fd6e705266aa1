// Memory: what an engine allocates for its user. A memfd, so that a peer on this host can map the very pages;
// page aligned, reserved and touched at birth, so that no first access pays for a fault or dies of a
// shortage.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "memory/available.hpp"
#include "memory/mapping.hpp"

namespace moonpool::transport {

using AskAvailable = std::function<std::optional<AvailableMemory>()>;

class Memory {
   public:
    // kTooLarge when the machine or the control group leaves less. `ask`: tests describe machines.
    // node: all of it is memory of that NUMA node, which may be one without CPUs (CXL).
    static Result<std::shared_ptr<Memory>> create(
        uint64_t bytes, const AskAvailable& ask = [] { return available_memory(); },
        std::optional<uint32_t> node = {});

    std::byte* data() const { return mapping_.data(); }
    uint64_t size() const { return mapping_.size(); }
    int fd() const { return fd_.get(); }

   private:
    Fd fd_;
    Mapping mapping_;
};

}  // namespace moonpool::transport
