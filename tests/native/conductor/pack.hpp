// A msgpack writer for tests: batches of KV events as engines send them.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::testing {

class Pack {
   public:
    Pack& nil() { return byte(0xc0); }
    Pack& array(size_t n) { return n < 16 ? byte(0x90 | n) : byte(0xdd).big(n, 4); }
    Pack& map(size_t n) { return n < 16 ? byte(0x80 | n) : byte(0xdf).big(n, 4); }
    Pack& real(double value) {
        uint64_t bits;
        std::memcpy(&bits, &value, 8);
        return byte(0xcb).big(bits, 8);
    }
    Pack& integer(uint64_t value) {
        if (value < 128) return byte(value);
        if (value <= UINT32_MAX) return byte(0xce).big(value, 4);
        return byte(0xcf).big(value, 8);
    }
    Pack& negative(int64_t value) { return byte(0xd3).big(static_cast<uint64_t>(value), 8); }
    Pack& text(std::string_view value) { return byte(0xd9).big(value.size(), 1).raw(value); }
    Pack& bytes(std::string_view value) { return byte(0xc4).big(value.size(), 1).raw(value); }
    Pack& integers(std::span<const uint64_t> values) {
        array(values.size());
        for (uint64_t v : values) integer(v);
        return *this;
    }
    Pack& raw(std::string_view value) {
        data.append(value);
        return *this;
    }

    std::span<const uint8_t> span() const {
        return {reinterpret_cast<const uint8_t*>(data.data()), data.size()};
    }
    std::string data;

   private:
    Pack& byte(uint64_t value) {
        data.push_back(static_cast<char>(value));
        return *this;
    }
    Pack& big(uint64_t value, int width) {
        for (int i = width - 1; i >= 0; --i) byte(value >> (8 * i) & 0xff);
        return *this;
    }
};

// A batch with the events that are appended to it.
inline Pack batch_of(const std::vector<std::string>& events, double sent_s = 1.0) {
    Pack out;
    out.array(3).real(sent_s).array(events.size());
    for (const std::string& event : events) out.raw(event);
    out.integer(0);
    return out;
}

struct Stored {
    std::vector<uint64_t> hashes;
    bool has_parent = false;
    uint64_t parent = 0;
    std::vector<uint64_t> tokens;
    uint64_t block_tokens = 4;
    std::string medium = "GPU";

    std::string packed() const {
        Pack p;
        p.map(7).text("type").text("BlockStored").text("block_hashes").integers(hashes);
        p.text("parent_block_hash");
        has_parent ? p.integer(parent) : p.nil();
        p.text("token_ids").integers(tokens).text("block_size").integer(block_tokens);
        p.text("lora_id").nil().text("medium").text(medium);
        return p.data;
    }
};

inline std::string removed(const std::vector<uint64_t>& hashes, std::string_view medium = "GPU") {
    Pack p;
    p.map(3).text("type").text("BlockRemoved").text("block_hashes").integers(hashes);
    p.text("medium").text(medium);
    return p.data;
}

inline std::string all_cleared() {
    Pack p;
    p.map(1).text("type").text("AllBlocksCleared");
    return p.data;
}

}  // namespace moonpool::testing
