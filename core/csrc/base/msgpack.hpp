// MsgpackReader: one pass over msgpack bytes of a stranger. Nothing is copied and nothing is trusted: each
// read says whether it found what it asked for, no count is believed beyond the bytes that are left, and
// skipping goes only so deep. After a failed read the reader is of no more use.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace moonpool {

class MsgpackReader {
   public:
    enum class Type { kNil, kBool, kInteger, kFloat, kText, kBytes, kArray, kMap, kExtension, kNothing };

    explicit MsgpackReader(std::span<const uint8_t> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

    bool done() const { return at_ == end_; }

    Type peek() const {
        if (at_ == end_) return Type::kNothing;
        uint8_t b = *at_;
        if (b <= 0x7f || b >= 0xe0 || (b >= 0xcc && b <= 0xd3)) return Type::kInteger;
        if (b <= 0x8f || b == 0xde || b == 0xdf) return Type::kMap;
        if (b <= 0x9f || b == 0xdc || b == 0xdd) return Type::kArray;
        if (b <= 0xbf || (b >= 0xd9 && b <= 0xdb)) return Type::kText;
        if (b == 0xc0) return Type::kNil;
        if (b == 0xc2 || b == 0xc3) return Type::kBool;
        if (b >= 0xc4 && b <= 0xc6) return Type::kBytes;
        if (b == 0xca || b == 0xcb) return Type::kFloat;
        return b == 0xc1 ? Type::kNothing : Type::kExtension;
    }

    bool nil() {
        if (peek() != Type::kNil) return false;
        ++at_;
        return true;
    }

    // The value's 64 bits: two's complement when `negative`.
    bool integer(uint64_t& value, bool& negative) {
        if (peek() != Type::kInteger) return false;
        uint8_t b = *at_++;
        negative = false;
        if (b <= 0x7f) {
            value = b;
            return true;
        }
        if (b >= 0xe0) {
            negative = true;
            value = static_cast<uint64_t>(int64_t{static_cast<int8_t>(b)});
            return true;
        }
        bool is_signed = b >= 0xd0;
        size_t width = size_t{1} << (b & 3);
        if (!big_endian(width, value)) return false;
        if (is_signed) {
            unsigned shift = static_cast<unsigned>(64 - 8 * width);
            auto extended = static_cast<int64_t>(value << shift) >> shift;
            negative = extended < 0;
            value = static_cast<uint64_t>(extended);
        }
        return true;
    }

    // Any number.
    bool number(double& value) {
        if (peek() == Type::kInteger) {
            uint64_t bits = 0;
            bool negative = false;
            if (!integer(bits, negative)) return false;
            value = negative ? static_cast<double>(static_cast<int64_t>(bits)) : static_cast<double>(bits);
            return true;
        }
        if (peek() != Type::kFloat) return false;
        uint8_t b = *at_++;
        uint64_t bits = 0;
        if (!big_endian(b == 0xca ? 4 : 8, bits)) return false;
        value = b == 0xca ? double{std::bit_cast<float>(static_cast<uint32_t>(bits))}
                          : std::bit_cast<double>(bits);
        return true;
    }

    bool text(std::string_view& value) { return peek() == Type::kText && string(value); }
    bool bytes(std::string_view& value) { return peek() == Type::kBytes && string(value); }

    // The number of elements that follow.
    bool array(uint32_t& count) { return peek() == Type::kArray && header(0x90, 0xdc, 1, count); }
    // The number of pairs that follow.
    bool map(uint32_t& count) { return peek() == Type::kMap && header(0x80, 0xde, 2, count); }

    // Whatever comes next, with all that is inside.
    bool skip(int depth_max = 16) {
        if (depth_max == 0) return false;
        uint64_t bits = 0;
        bool negative = false;
        double real = 0;
        std::string_view view;
        uint32_t count = 0;
        switch (peek()) {
            case Type::kNil:
            case Type::kBool:
                ++at_;
                return true;
            case Type::kInteger:
                return integer(bits, negative);
            case Type::kFloat:
                return number(real);
            case Type::kText:
            case Type::kBytes:
                return string(view);
            case Type::kExtension:
                return extension();
            case Type::kArray:
            case Type::kMap: {
                bool is_map = peek() == Type::kMap;
                if (is_map ? !map(count) : !array(count)) return false;
                for (uint64_t i = 0; i < uint64_t{count} * (is_map ? 2 : 1); ++i) {
                    if (!skip(depth_max - 1)) return false;
                }
                return true;
            }
            case Type::kNothing:
                break;
        }
        return false;
    }

   private:
    size_t left() const { return static_cast<size_t>(end_ - at_); }

    bool big_endian(size_t width, uint64_t& value) {
        if (left() < width) return false;
        value = 0;
        for (size_t i = 0; i < width; ++i) value = value << 8 | at_[i];
        at_ += width;
        return true;
    }

    bool take(uint64_t size, std::string_view& value) {
        if (left() < size) return false;
        value = {reinterpret_cast<const char*>(at_), size};
        at_ += size;
        return true;
    }

    bool string(std::string_view& value) {
        uint8_t b = *at_++;
        uint64_t size = b & 0x1f;
        if (b >= 0xc0) {
            size_t width = b >= 0xd9 ? size_t{1} << (b - 0xd9) : size_t{1} << (b - 0xc4);
            if (!big_endian(width, size)) return false;
        }
        return take(size, value);
    }

    bool extension() {
        uint8_t b = *at_++;
        uint64_t size = 0;
        std::string_view view;
        if (b >= 0xd4) {
            size = uint64_t{1} << (b - 0xd4);
        } else if (!big_endian(size_t{1} << (b - 0xc7), size)) {
            return false;
        }
        return take(size + 1, view);
    }

    bool header(uint8_t fixed, uint8_t wide, size_t each, uint32_t& count) {
        uint8_t b = *at_++;
        uint64_t n = b & 0x0f;
        if ((b & 0xf0) != fixed && !big_endian(b == wide ? 2 : 4, n)) return false;
        if (n > left() / each) return false;  // an element has a byte at least
        count = static_cast<uint32_t>(n);
        return true;
    }

    const uint8_t* at_;
    const uint8_t* end_;
};

}  // namespace moonpool
