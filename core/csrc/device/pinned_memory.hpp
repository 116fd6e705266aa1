// PinnedMemory: page-locked memory of the host, on the NUMA node of a card where the system lets a process
// choose, else wherever it lies. It is mapped first and registered then: cuMemHostAlloc would leave the node
// to the driver. A child of fork() does not have the mapping: a page that the child and the parent shared
// would be copied at the parent's next write, away from the page that the card knows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/device.hpp"

namespace moonpool::device {

class PinnedMemory {
   public:
    // bytes: whole pages.
    static Result<PinnedMemory> allocate(std::shared_ptr<const Device> device, uint64_t bytes);
    PinnedMemory() = default;
    PinnedMemory(PinnedMemory&& other) noexcept;
    PinnedMemory& operator=(PinnedMemory&& other) noexcept;
    ~PinnedMemory();

    std::byte* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    // The system placed it on the node of the card, or said so.
    bool on_node() const { return on_node_; }
    // It stays mapped and pinned for ever: for work of a card that does not end.
    void leak() { bytes_ = 0; }

   private:
    void free();

    std::shared_ptr<const Device> device_;
    std::byte* data_ = nullptr;
    uint64_t bytes_ = 0;
    bool on_node_ = false;
};

}  // namespace moonpool::device
