// What an octet of a head may be.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace moonpool::http {

constexpr char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; }

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

// In no part of a head: everything below the blank but the tab, and DEL.
constexpr bool is_control(char c) {
    auto octet = static_cast<uint8_t>(c);
    return (octet < 0x20 && octet != '\t') || octet == 0x7F;
}

// Visible ASCII: no blank, no control, nothing above 0x7E.
constexpr bool is_visible(char c) { return c >= 0x21 && c <= 0x7E; }

// A character of a token (RFC 9110 section 5.6.2).
inline constexpr std::array<bool, 256> kTokenOctets = [] {
    std::array<bool, 256> table = {};
    for (char c :
         std::string_view("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        table[static_cast<uint8_t>(c)] = true;
    return table;
}();

inline bool is_token_octet(char c) { return kTokenOctets[static_cast<uint8_t>(c)]; }

// The number that a Content-Length says: 1 to 18 digits and nothing else; -1: no such number.
constexpr int64_t length_of(std::string_view value) {
    if (value.empty() || value.size() > 18) return -1;
    int64_t length = 0;
    for (char c : value) {
        if (!is_digit(c)) return -1;
        length = length * 10 + (c - '0');
    }
    return length;
}

}  // namespace moonpool::http
