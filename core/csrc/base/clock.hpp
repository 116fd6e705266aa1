// The clock that never jumps, as a number since an arbitrary start.
#pragma once

#include <chrono>
#include <cstdint>

namespace moonpool {

inline uint64_t now_ns() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline uint64_t now_ms() { return now_ns() / 1000000; }

}  // namespace moonpool
