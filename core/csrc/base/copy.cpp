#include "base/copy.hpp"

#include <cstring>

namespace moonpool {

void copy(void* dst, const void* src, size_t size) {
    if (size != 0) std::memcpy(dst, src, size);
}

}  // namespace moonpool
