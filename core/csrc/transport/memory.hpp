// Memory: what an engine allocates for its user. A memfd, so that a peer on this host can map the very pages;
// page aligned, reserved and touched at birth, so that no first access pays for a fault or dies of a
// shortage.
#pragma once

#include <memory>

#include "memory/mapping.hpp"

namespace moonpool::transport {

class Memory {
   public:
    static Result<std::shared_ptr<Memory>> create(uint64_t bytes);

    std::byte* data() const { return mapping_.data(); }
    uint64_t size() const { return mapping_.size(); }
    int fd() const { return fd_.get(); }

   private:
    Fd fd_;
    Mapping mapping_;
};

}  // namespace moonpool::transport
