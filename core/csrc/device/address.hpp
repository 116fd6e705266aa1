// What an address is, as the CUDA driver says. A caller's word is never taken for it: an engine's address of
// a tensor on a card looks like any other, and touching it ends the process.
//
// The question is answered without CUDA: where no component of the process has opened and initialised the
// driver, no address can be a device's, and nothing is opened to find that out. About 1 us where CUDA is.
#pragma once

#include <cstdint>

#include "base/result.hpp"
#include "device/cuda.hpp"

namespace moonpool::device {

enum class AddressKind {
    kUnknown,  // not the driver's: pageable memory of the host, or nothing at all
    kPinned,   // page-locked memory of the host, allocated or registered by any component of the process
    kDevice,   // memory of a card
    kManaged,  // memory that moves between host and card by itself
};

struct Address {
    AddressKind kind = AddressKind::kUnknown;
    int device = -1;               // ordinal; of pinned memory the one it was pinned with
    uint64_t base = 0, bytes = 0;  // the allocation, or reserved range, it lies in; 0: not told
    CuContext* context = nullptr;  // null: memory mapped by cuMemMap has none
};

// Of all of [address, address + bytes): an error when its ends differ in kind, device or allocation. Of a
// range that was reserved and mapped in pieces (torch's expandable segments), holes between the ends are not
// seen.
Result<Address> classify(uint64_t address, uint64_t bytes);

}  // namespace moonpool::device
