#include "device/ipc.hpp"

#include <utility>

#include "device/address.hpp"

namespace moonpool::device {

namespace {

constexpr const char* kNoIpc = "the CUDA driver of this system shares no memory between processes";

}  // namespace

Result<IpcExport> export_memory(const Device& device, uint64_t address) {
    if (!device.driver().has_ipc()) return Error{Code::kUnavailable, kNoIpc};
    Result<Address> found = classify(address, 1);
    if (!found) return found.error();
    if (found->kind != AddressKind::kDevice || found->base == 0) {
        return Error{Code::kInvalidArgument, "that address is no memory of a CUDA device"};
    }
    IpcExport made{.handle = {}, .base = found->base, .bytes = found->bytes};
    OnDevice here(device);
    if (!here) return here.error();
    Status got =
        device.check(device.driver().cuIpcGetMemHandle(&made.handle, made.base), "cuIpcGetMemHandle");
    if (got) return made;
    return Error{got.error().code,
                 "the CUDA driver does not share this memory with other processes, as it "
                 "does not share memory of expandable segments or of other processes (" +
                     got.error().text + ")"};
}

Result<IpcMemory> IpcMemory::open(std::shared_ptr<const Device> device, const CuIpcMemory& handle) {
    if (!device->driver().has_ipc()) return Error{Code::kUnavailable, kNoIpc};
    OnDevice here(*device);
    if (!here) return here.error();
    uint64_t address = 0;
    // The flag also lets the other cards of this process reach it, where the machine can.
    Status opened = device->check(
        device->driver().cuIpcOpenMemHandle(&address, handle, cu::kIpcLazyPeerAccess), "cuIpcOpenMemHandle");
    if (!opened) {
        return Error{opened.error().code,
                     "the CUDA driver does not open the peer's memory: " + opened.error().text};
    }
    return IpcMemory(std::move(device), address);
}

IpcMemory::IpcMemory(IpcMemory&& other) noexcept
    : device_(std::move(other.device_)), address_(std::exchange(other.address_, 0)) {}

IpcMemory::~IpcMemory() {
    if (address_ == 0) return;
    if (OnDevice here(*device_); here) device_->driver().cuIpcCloseMemHandle(address_);
}

}  // namespace moonpool::device
