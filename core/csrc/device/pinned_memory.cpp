#include "device/pinned_memory.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace moonpool::device {

namespace {

constexpr int kPreferNode = 1;  // MPOL_PREFERRED: another node rather than no memory

// False where the system refuses, as containers may, or where the node is not known.
bool prefer_node(void* data, uint64_t bytes, int node) {
    if (node < 0 || node >= 1024) return false;
    unsigned long nodes[1024 / (8 * sizeof(unsigned long))] = {};
    constexpr int kBits = 8 * sizeof(unsigned long);
    nodes[node / kBits] |= 1ul << (node % kBits);
    return ::syscall(SYS_mbind, data, bytes, kPreferNode, nodes, 1024ul, 0ul) == 0;
}

}  // namespace

Result<PinnedMemory> PinnedMemory::allocate(std::shared_ptr<const Device> device, uint64_t bytes) {
    OnDevice here(*device);
    if (!here) return here.error();
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return os_error("cannot map " + std::to_string(bytes) + " bytes to be pinned");
    ::madvise(data, bytes, MADV_DONTFORK);
    ::madvise(data, bytes, MADV_HUGEPAGE);
    bool on_node = prefer_node(data, bytes, device->facts().numa_node);
    Status pinned = device->check(device->driver().cuMemHostRegister(data, bytes, cu::kRegisterPortable),
                                  "cuMemHostRegister");
    if (!pinned) {
        ::munmap(data, bytes);
        return pinned.error();
    }
    PinnedMemory memory;
    memory.data_ = static_cast<std::byte*>(data);
    memory.bytes_ = bytes;
    memory.on_node_ = on_node;
    memory.device_ = std::move(device);
    return memory;
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : device_(std::move(other.device_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      on_node_(other.on_node_) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
    if (this != &other) {
        free();
        device_ = std::move(other.device_);
        data_ = std::exchange(other.data_, nullptr);
        bytes_ = std::exchange(other.bytes_, 0);
        on_node_ = other.on_node_;
    }
    return *this;
}

PinnedMemory::~PinnedMemory() { free(); }

void PinnedMemory::free() {
    if (bytes_ == 0) return;
    // A child has no such mapping, and something else may lie there.
    if (OnDevice here(*device_); here) {
        // A card that is lost may still write: what the driver keeps registered stays mapped.
        if (device_->driver().cuMemHostUnregister(data_) == cu::kSuccess) ::munmap(data_, bytes_);
    }
    bytes_ = 0;
}

}  // namespace moonpool::device
