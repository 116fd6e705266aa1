// Memory: what an engine allocates for its user. A memfd, or a piece of a DAX device, so that a peer on this
// host can map the very pages; page aligned, reserved and touched at birth, so that no first access pays for
// a fault or dies of a shortage.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "memory/available.hpp"
#include "memory/dax_memory.hpp"
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

    // Of a DAX device. kTooLarge when no piece of it is free that is so long.
    static Result<std::shared_ptr<Memory>> create_on(const DaxDevice& device, uint64_t bytes);

    std::byte* data() const { return dax_ == nullptr ? mapping_.data() : dax_->data(); }
    uint64_t size() const { return size_; }
    int fd() const { return fd_.get(); }  // -1: of a DAX device
    const DaxPlace* dax_place() const { return dax_ == nullptr ? nullptr : &dax_->place(); }

   private:
    uint64_t size_ = 0;
    Fd fd_;
    Mapping mapping_;
    std::unique_ptr<DaxMemory> dax_;
};

}  // namespace moonpool::transport
