#include "memory/address.hpp"

#include <cstdio>
#include <iterator>
#include <string>

#include "device/address.hpp"
#include "device/driver.hpp"
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

Result<MemoryRef> MemoryKinds::describe(uint64_t address, uint64_t bytes) {
    MemoryRef ref{.address = address, .bytes = bytes};
    if (!has_driver_) has_driver_ = device::Driver::if_loaded() != nullptr;
    if (!*has_driver_) return ref;
    if (auto after = known_.upper_bound(address); after != known_.begin()) {
        const Known& known = std::prev(after)->second;
        if (address < known.end && bytes <= known.end - address) {
            ref.kind = known.memory.kind;
            ref.device = known.memory.device;
            return ref;
        }
    }
    Result<device::Address> found = device::classify(address, bytes);
    if (!found) return found.error();
    if (found->kind == device::AddressKind::kPinned) ref.kind = MemoryKind::kPinned;
    if (found->kind == device::AddressKind::kDevice) {
        ref.kind = MemoryKind::kDevice;
        ref.device = static_cast<int16_t>(found->device);
    }
    if (found->bytes != 0) known_.insert_or_assign(found->base, Known{found->base + found->bytes, ref});
    return ref;
}

}  // namespace moonpool
