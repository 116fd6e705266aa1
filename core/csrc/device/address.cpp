#include "device/address.hpp"

#include <cstdio>
#include <iterator>
#include <string>

#include "device/driver.hpp"

namespace moonpool::device {

namespace {

std::string hex(uint64_t address) {
    char text[24];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
    return text;
}

// Of one byte. The driver fills in zeros for an address that it does not know.
Address ask(const Driver& driver, uint64_t address) {
    CuContext* context = nullptr;
    unsigned memory_type = 0;
    bool managed[8] = {};  // the driver writes one byte, of older ones it is said that they wrote an int
    int device = -1;
    void* start = nullptr;
    size_t bytes = 0;
    int attributes[] = {cu::kAddressContext, cu::kAddressMemoryType, cu::kAddressManaged,
                        cu::kAddressDevice,  cu::kAddressRangeStart, cu::kAddressRangeBytes};
    void* values[] = {&context, &memory_type, managed, &device, &start, &bytes};
    int code = driver.cuPointerGetAttributes(std::size(attributes), attributes, values, address);
    // An error is the answer of a driver that was not initialised: then nothing is its own.
    if (code != cu::kSuccess || memory_type == 0) return {};
    Address found{.kind = AddressKind::kPinned,
                  .device = device,
                  .base = reinterpret_cast<uint64_t>(start),
                  .bytes = bytes,
                  .context = context};
    if (memory_type != cu::kMemoryOfHost) found.kind = AddressKind::kDevice;
    if (managed[0]) found.kind = AddressKind::kManaged;
    return found;
}

}  // namespace

Result<Address> classify(uint64_t address, uint64_t bytes) {
    if (bytes > UINT64_MAX - address) {
        return Error{Code::kInvalidArgument,
                     hex(address) + " and " + std::to_string(bytes) + " bytes go beyond the last address"};
    }
    const Driver* driver = Driver::if_loaded();
    if (driver == nullptr) return Address{};
    Address first = ask(*driver, address);
    if (bytes <= 1) return first;
    Address last = ask(*driver, address + bytes - 1);
    if (first.kind != last.kind || first.device != last.device || first.base != last.base) {
        return Error{Code::kInvalidArgument,
                     std::to_string(bytes) + " bytes from " + hex(address) +
                         " on are no single range of memory: they begin and end in different allocations"};
    }
    return first;
}

}  // namespace moonpool::device
