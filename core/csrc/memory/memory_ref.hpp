// MemoryRef: where bytes lie. Every layer that moves bytes (store, hand-over, transfer engine) names them
// this way, and only a Copier (memory/copier.hpp), a transport or a system call touches what it names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

// What the memory is, never which component allocated it. The numbers stand in frames.
enum class MemoryKind : uint8_t {
    kHost = 0,       // pageable memory of this process
    kHostArena = 1,  // a memfd that other processes of this host can map
    kPinned = 2,     // page-locked host memory that a device reaches by DMA
    kDevice = 3,     // memory of the device `device`, not reachable by CPU loads
    kFile = 4,       // `address` is an offset in a file
};

inline constexpr bool reachable_by_cpu(MemoryKind kind) {
    return kind == MemoryKind::kHost || kind == MemoryKind::kHostArena || kind == MemoryKind::kPinned;
}

struct MemoryRef {
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint32_t region = 0;  // number of the registration it lies in, 0: in none
    int16_t device = -1;  // ordinal of the device, -1: none
    MemoryKind kind = MemoryKind::kHost;

    static MemoryRef host(const void* data, uint64_t bytes) {
        return {.address = reinterpret_cast<uint64_t>(data), .bytes = bytes};
    }
    std::byte* data() const { return reinterpret_cast<std::byte*>(address); }  // reachable_by_cpu() only
    MemoryRef sub(uint64_t offset, uint64_t length) const {                    // within this one
        MemoryRef part = *this;
        part.address += offset;
        part.bytes = length;
        return part;
    }
};
static_assert(sizeof(MemoryRef) == 24);

}  // namespace moonpool
