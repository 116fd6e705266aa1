// Memory of a card that another process opens by a handle (CUDA IPC): the two see the same bytes, and the
// card copies between them without the host.
//
//     owner    IpcExport exported = *export_memory(device, address);
//     user     IpcMemory memory = *IpcMemory::open(device, exported.handle);    the whole allocation
//
// A handle covers the allocation that has the address. The process that made it cannot open it. The driver
// does not say what becomes of memory whose owner frees it or ends: the two agree on when neither uses it, by
// means of their own (transport/cuda_ipc).
//
// Any thread. Opening and closing may wait for the card, so no I/O thread does either.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.hpp"

namespace moonpool::device {

struct IpcExport {
    CuIpcMemory handle{};
    uint64_t base = 0, bytes = 0;  // of the allocation, as its owner sees it
};

// The allocation that has the address. An error in one sentence: the driver has no IPC, or it does not share
// this memory.
Result<IpcExport> export_memory(const Device& device, uint64_t address);

// Memory of another process, as this one sees it. Closed by its destructor; the owner of this object first
// makes sure that no copy uses it any more.
class IpcMemory {
   public:
    // device: the card whose memory it is, as this process sees it.
    static Result<IpcMemory> open(std::shared_ptr<const Device> device, const CuIpcMemory& handle);
    IpcMemory(IpcMemory&& other) noexcept;
    IpcMemory& operator=(IpcMemory&&) = delete;
    ~IpcMemory();

    uint64_t address() const { return address_; }  // of the allocation's first byte
    // Where the card hangs or is lost: it stays open until this process ends.
    void leak() { address_ = 0; }

   private:
    IpcMemory(std::shared_ptr<const Device> device, uint64_t address)
        : device_(std::move(device)), address_(address) {}

    std::shared_ptr<const Device> device_;
    uint64_t address_ = 0;
};

}  // namespace moonpool::device
