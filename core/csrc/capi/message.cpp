#include "capi/message.hpp"

#include <cstdint>
#include <span>

#include "base/msgpack.hpp"

namespace moonpool::capi {

namespace {

void append_text(std::string& out, std::string_view text) {
    auto put = [&out](uint64_t value, int bytes) {
        for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
            out.push_back(static_cast<char>((value >> shift) & 0xff));
        }
    };
    if (text.size() < 32) {
        put(0xa0 | text.size(), 1);
    } else if (text.size() < 256) {
        put(0xd9, 1), put(text.size(), 1);
    } else if (text.size() < 65536) {
        put(0xda, 1), put(text.size(), 2);
    } else {
        put(0xdb, 1), put(text.size(), 4);
    }
    out.append(text);
}

}  // namespace

std::string pack_message(std::string_view name, std::string_view text) {
    std::string out(1, '\x92');
    append_text(out, name);
    append_text(out, text);
    return out;
}

std::pair<std::string, std::string> unpack_message(const std::string& peer, std::string_view bytes) {
    MsgpackReader reader({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    uint32_t count = 0;
    std::string_view name, text;
    if (reader.array(count) && count == 2 && reader.text(name) && reader.text(text) && reader.done()) {
        return {std::string(name), std::string(text)};
    }
    return {peer, std::string(bytes)};
}

}  // namespace moonpool::capi
