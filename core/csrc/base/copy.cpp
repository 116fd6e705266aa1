#include "base/copy.hpp"

#include <cstring>

namespace moonpool {

// Plain memcpy, on purpose. Streaming stores are faster while no core reads the destination (Zen 5, 1 MiB
// objects over 256 MiB: 29 GB/s against 19), but a copy is made to be read: copied and then read it is 16.7
// against 16.6, and into a destination that is used again and again 16.8 against 22.
void copy(void* dst, const void* src, size_t size) {
    if (size != 0) std::memcpy(dst, src, size);
}

}  // namespace moonpool
