// What a kind of memory is called in messages and by users.
#pragma once

#include <string>

#include "memory/memory_ref.hpp"

namespace moonpool {

// "host", "host_arena", "pinned", "device", "file"; "kind 9" for what a later version may list.
std::string kind_name(MemoryKind kind);

}  // namespace moonpool
