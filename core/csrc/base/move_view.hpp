// Views into a buffer that grew, and so lies elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moonpool {

// `from` may be freed already: addresses are compared as numbers. Empty views are left alone.
inline void move_view(std::string_view& view, const char* from, const char* to) {
    if (view.empty()) return;
    size_t at = reinterpret_cast<uintptr_t>(view.data()) - reinterpret_cast<uintptr_t>(from);
    view = std::string_view(to + at, view.size());
}

}  // namespace moonpool
