// KernelMover: objects cross the link whole, by way of staging memory, and the kernel moves their rows on the
// card (device/objects_kernel.hpp). A slot begins with the list of objects that the kernel reads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/device.hpp"
#include "device/device_memory.hpp"
#include "device/objects_kernel.hpp"
#include "device/pinned_ring.hpp"
#include "store/client/node_client.hpp"
#include "store/device/kv_mover.hpp"

namespace moonpool {

class KernelMover final : public KvMover {
   public:
    // Bytes of the list.
    static uint64_t list_bytes(size_t objects);
    // table: rows at most 4 GiB long. blocks: of the kernel's threads.
    static Result<std::unique_ptr<KernelMover>> open(std::shared_ptr<const device::Device> device,
                                                     device::PinnedRing& ring, const PartTable& table,
                                                     uint32_t kernel_blocks);

    uint64_t head_bytes(size_t objects) const override { return list_bytes(objects); }
    bool needs_staging() const override { return true; }
    Status to_kv(const ChunkInFlight& in, std::span<const KvPlace> objects,
                 const device::Event* after) const override;
    Status to_slot(const ChunkInFlight& in, std::span<const KvPlace> objects,
                   const device::Event* after) const override;
    void leak() override { rows_.leak(); }

   private:
    KernelMover(std::shared_ptr<const device::Device> device, device::ObjectsKernel kernel,
                uint32_t kernel_blocks)
        : device_(std::move(device)), kernel_(std::move(kernel)), kernel_blocks_(kernel_blocks) {}
    Status upload(device::PinnedRing& ring, const PartTable& table);
    std::vector<device::Copy> to_staging(const ChunkInFlight& in, std::span<const KvPlace> objects) const;
    Status launch(const ChunkInFlight& in, size_t objects, device::Move move) const;

    std::shared_ptr<const device::Device> device_;
    device::ObjectsKernel kernel_;
    const uint32_t kernel_blocks_;
    device::DeviceMemory rows_;  // KvRow[], then begins
    uint64_t begins_ = 0;
    std::vector<uint64_t> object_bytes_;  // of each column
};

}  // namespace moonpool
