// A paged KV cache on a card in one of the engines' layouts, with its row table, and the same in plain loops.
//
//     tokens first   layer | block | token | head | content     one row for each layer and token
//     heads first    layer | block | head | token | content     one row for each layer
//
// An object is one head of one block: layers, then tokens. MLA has one head.
#pragma once

#include "bed.hpp"
#include "device/objects_kernel.hpp"

namespace moonpool::testing {

struct KvShape {
    bool tokens_first = true;
    unsigned layers = 2, heads = 2, tokens = 4, blocks = 3;
    unsigned content = 512;  // bytes of one token of one head in one layer
    unsigned shift = 0;      // of the cache's first byte from an aligned address
    unsigned staging_shift = 0;

    constexpr uint64_t block_bytes() const { return uint64_t{heads} * tokens * content; }
    constexpr uint64_t bytes() const { return layers * blocks * block_bytes(); }
    constexpr uint64_t object_bytes() const { return uint64_t{layers} * tokens * content; }
    constexpr unsigned objects() const { return blocks * heads; }
    // Of a token of a head, in the cache.
    uint64_t at(unsigned layer, unsigned block, unsigned head, unsigned token) const {
        uint64_t row = tokens_first ? uint64_t{token} * heads + head : uint64_t{head} * tokens + token;
        return (uint64_t{layer} * blocks + block) * block_bytes() + row * content;
    }
};

// Rows and begins of a cache at an address.
struct RowTable {
    std::vector<device::KvRow> rows;
    std::vector<uint32_t> begins{0};
};
inline RowTable row_table(const KvShape& shape, uint64_t cache) {
    RowTable table;
    for (unsigned head = 0; head < shape.heads; ++head) {
        for (unsigned layer = 0; layer < shape.layers; ++layer) {
            unsigned rows = shape.tokens_first ? shape.tokens : 1;
            unsigned bytes = shape.tokens_first ? shape.content : shape.tokens * shape.content;
            for (unsigned row = 0; row < rows; ++row) {
                table.rows.push_back({cache + shape.at(layer, 0, head, row), shape.block_bytes(), bytes,
                                      (layer * shape.tokens + row) * shape.content});
            }
        }
        table.begins.push_back(static_cast<uint32_t>(table.rows.size()));
    }
    return table;
}

// Object `index` of a cache, by a plain loop. Blocks are named in another order than they lie.
inline unsigned block_of(const KvShape& shape, unsigned index) {
    return (index / shape.heads * 5 + 1) % shape.blocks;
}
inline std::vector<unsigned char> object_of(const KvShape& shape, const unsigned char* cache,
                                            unsigned index) {
    std::vector<unsigned char> object;
    for (unsigned layer = 0; layer < shape.layers; ++layer) {
        for (unsigned token = 0; token < shape.tokens; ++token) {
            const unsigned char* from =
                cache + shape.at(layer, block_of(shape, index), index % shape.heads, token);
            object.insert(object.end(), from, from + shape.content);
        }
    }
    return object;
}

// Bytes of the host on the card.
template <class T>
device::DeviceMemory upload(Bed& bed, const std::vector<T>& values) {
    Pinned from(bed, values.size() * sizeof(T));
    std::memcpy(from.data(), values.data(), from.size());
    device::DeviceMemory memory = device::must(device::DeviceMemory::allocate(bed.device, from.size()));
    copy_now(bed, memory.address(), from.address(), from.size());
    return memory;
}

}  // namespace moonpool::testing
