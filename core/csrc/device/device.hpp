// Device: a card of this process by its ordinal, with its primary context, which torch and every engine use
// as well. What streams, events and memory share; each of them keeps it alive.
//
// OnDevice: while it lives, the calling thread's calls go to that device and never break the graph capture of
// another thread (an engine records CUDA graphs; a call such as cuMemAlloc or cuEventQuery from a thread of
// the default capture mode ends that recording). Every call of the driver in this folder is made under one;
// it restores what the thread had before, because the thread may be the engine's. Two calls of the driver
// each way, about 0.1 us.
//
// An error for ever (device/outcome.hpp) is remembered in lost(): the component that owns the device looks at
// it to tell its requests once. A child of fork() has the handles and no device: calls answer kForked there,
// and destructors leave the driver alone.
//
// Any thread; nothing is locked.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "base/fork.hpp"
#include "base/result.hpp"
#include "device/driver.hpp"

namespace moonpool::device {

struct DeviceFacts {
    int ordinal = -1;    // of this process: CUDA_VISIBLE_DEVICES of another process gives it another card
    std::string name;    // "NVIDIA H100 80GB HBM3"
    std::string bus_id;  // "0000:17:00.0", the same in every process
    std::array<unsigned char, 16> uuid{};
    uint64_t bytes = 0;
    int numa_node = -1;  // of the host's memory that is next to it, -1: unknown
    int multiprocessors = 0;
    int copy_engines = 0;
    int compute_capability = 0;        // 90: 9.0
    bool registers_read_only = false;  // memory that is mapped read-only can be pinned
    bool orders_nic_writes = false;    // its kernels see what a NIC wrote to its memory before they began
};

using DeviceUuid = std::array<unsigned char, 16>;  // of a card, or of a part of one (MIG); in every process

class Device {
   public:
    static Result<std::shared_ptr<Device>> open(int ordinal);
    // The ordinal by which this process sees the card; an error: it does not. Needs no context.
    static Result<int> find(const DeviceUuid& uuid);
    ~Device();
    Device(const Device&) = delete;

    const DeviceFacts& facts() const { return facts_; }
    const Driver& driver() const { return driver_; }
    CuContext* context() const { return context_; }
    bool in_child() const { return fork_.in_child(); }

    // The code that ended this device for this process, 0: none.
    int lost() const { return lost_.load(std::memory_order_relaxed); }

    // `code` as a Status; call: the function that answered it. An error for ever is remembered.
    Status check(int code, const char* call) const;

   private:
    friend class OnDevice;
    explicit Device(const Driver& driver) : driver_(driver) {}

    const Driver& driver_;
    ForkGuard fork_;
    int handle_ = 0;  // CUdevice
    CuContext* context_ = nullptr;
    DeviceFacts facts_;
    mutable std::atomic<int> lost_{0};
};

class OnDevice {
   public:
    explicit OnDevice(const Device& device);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;

    // False: no call may be made; error() says why.
    explicit operator bool() const { return entered_; }
    const Error& error() const { return status_.error(); }

   private:
    const Device& device_;
    Status status_;
    bool entered_ = false;
    int capture_mode_ = cu::kCaptureModeRelaxed;
};

}  // namespace moonpool::device
