#include "memory/address.hpp"

#include <cstdio>
#include <string>

#include "device/address.hpp"
#include "memory/reachable.hpp"

namespace moonpool {

Result<MemoryRef> describe_memory(uint64_t address, uint64_t bytes) {
    Result<device::Address> known = device::classify(address, bytes);
    if (!known) return known.error();
    MemoryRef ref{.address = address, .bytes = bytes};
    switch (known->kind) {
        case device::AddressKind::kDevice:
            ref.kind = MemoryKind::kDevice;
            ref.device = static_cast<int16_t>(known->device);
            return ref;
        case device::AddressKind::kPinned:
            ref.kind = MemoryKind::kPinned;
            return ref;
        case device::AddressKind::kManaged:
            return Error{Code::kInvalidArgument,
                         "managed CUDA memory is not supported: it moves while it is copied"};
        case device::AddressKind::kUnknown:
            break;
    }
    if (std::optional<Unreachable> hole = find_unreachable(address, bytes)) {
        char text[128];
        std::snprintf(text, sizeof(text), "at 0x%llx %s", static_cast<unsigned long long>(hole->address),
                      hole->why);
        return Error{Code::kInvalidArgument, text};
    }
    return ref;
}

}  // namespace moonpool
