// Memory of a card as a descriptor that the drivers of other devices take, NICs above all (dma-buf). It needs
// a CUDA driver whose kernel module is the open one, and Linux 5.12.
//
// The descriptor keeps the memory, and so does what was made of it. Any thread; it may wait for the card.
#pragma once

#include <cstdint>

#include "base/fd.hpp"
#include "base/result.hpp"
#include "device/device.hpp"

namespace moonpool::device {

struct DmaBuf {
    Fd fd;
    uint64_t offset = 0;  // of the address in it
};

// Of the whole pages of the host that hold the range. An error in one sentence: the driver exports none of
// it.
Result<DmaBuf> export_dma_buf(const Device& device, uint64_t address, uint64_t bytes);

}  // namespace moonpool::device
