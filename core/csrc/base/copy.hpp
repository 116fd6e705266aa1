// The copy of bytes between memory regions that do not overlap: one name, so that its choice is made once.
#pragma once

#include <cstddef>

namespace moonpool {

void copy(void* dst, const void* src, size_t size);

}  // namespace moonpool
