// Version: place in the one order of removals and replacements, term << 32 | sequence; 0: older than all.
#pragma once

#include <cstdint>

namespace moonpool {

using Version = uint64_t;

}  // namespace moonpool
