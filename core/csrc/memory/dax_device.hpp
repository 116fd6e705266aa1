// DaxDevice: memory that the kernel gives as a device file, /dev/dax0.0, instead of adding it to its own: an
// NVDIMM, or memory behind CXL. What it is stands in /sys/bus/dax/devices. A pure function of files below a
// root, so that tests describe machines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/fd.hpp"
#include "base/result.hpp"

namespace moonpool {

struct DaxDevice {
    std::string name;  // "dax0.0"
    std::string root;  // of the files; "" but in tests
    uint64_t bytes = 0;
    uint64_t align = 0;  // of offsets and lengths that can be mapped
    int node = -1;       // the NUMA node that its memory would be; -1: none

    // path: "/dev/dax0.0", or the name alone.
    static Result<DaxDevice> find(std::string_view path, const std::string& root = "");
    // The device file, after a check that it is the device that /sys describes.
    Result<Fd> open() const;
    std::string path() const { return "/dev/" + name; }
};

}  // namespace moonpool
