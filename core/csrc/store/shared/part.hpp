// Part: one of the pieces of memory that an object is put from, or got into, one after another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool {

struct Part {
    std::byte* data = nullptr;
    uint64_t size = 0;
};

}  // namespace moonpool
