// Whether bytes are UTF-8: what may become a Python str, a label of a metric or a line of a log.
#pragma once

#include <cstddef>
#include <string_view>

namespace moonpool {

// As RFC 3629 has it: no overlong form, no surrogate, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
    auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    for (size_t i = 0; i < text.size();) {
        unsigned char lead = byte(i);
        if (lead < 0x80) {
            ++i;
            continue;
        }
        size_t more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
        if (lead < 0xC2 || lead > 0xF4 || text.size() - i <= more) return false;
        unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (byte(i + 1) < low || byte(i + 1) > high) return false;
        for (size_t k = 2; k <= more; ++k) {
            if ((byte(i + k) & 0xC0) != 0x80) return false;
        }
        i += more + 1;
    }
    return true;
}

}  // namespace moonpool
