#include "memory/kind_name.hpp"

namespace moonpool {

std::string kind_name(MemoryKind kind) {
    switch (kind) {
        case MemoryKind::kHost:
            return "host";
        case MemoryKind::kHostArena:
            return "host_arena";
        case MemoryKind::kPinned:
            return "pinned";
        case MemoryKind::kDevice:
            return "device";
        case MemoryKind::kFile:
            return "file";
    }
    return "kind " + std::to_string(static_cast<unsigned>(kind));
}

}  // namespace moonpool
