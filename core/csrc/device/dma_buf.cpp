#include "device/dma_buf.hpp"

#include <unistd.h>

namespace moonpool::device {

Result<DmaBuf> export_dma_buf(const Device& device, uint64_t address, uint64_t bytes) {
    const Driver& driver = device.driver();
    if (driver.cuMemGetHandleForAddressRange == nullptr) {
        return Error{Code::kUnavailable, "the CUDA driver of this system exports no memory as dma-buf"};
    }
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t begin = address / page * page;
    const uint64_t end = (address + bytes + page - 1) / page * page;
    OnDevice here(device);
    if (!here) return here.error();
    int fd = -1;
    Status got =
        device.check(driver.cuMemGetHandleForAddressRange(&fd, begin, end - begin, cu::kRangeAsDmaBuf, 0),
                     "cuMemGetHandleForAddressRange");
    if (!got) {
        return Error{got.error().code,
                     "the CUDA driver does not export this memory as dma-buf (" + got.error().text + ")"};
    }
    return DmaBuf{Fd(fd), address - begin};
}

}  // namespace moonpool::device
