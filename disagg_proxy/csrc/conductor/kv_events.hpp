// What engines and nodes say about their KV blocks, decoded: docs/events.md has the format. vLLM's events as
// maps and in the older array form, SGLang's, and the pool's own are one.
//
// Pure. The result refers into the payload. Fields that are not known are skipped; a known field of a wrong
// type refuses the whole batch.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace moonpool {

enum class KvTier : uint8_t { kDevice = 0, kHost = 1, kDisk = 2 };
inline constexpr size_t kKvTiers = 3;

// An engine's own name of a block.
struct EventHash {
    uint64_t value = 0;      // the integer, or XXH3 of the bytes
    std::string_view bytes;  // empty: it was an integer
};

// What belongs to a block besides its tokens: the LoRA's name and the salt, in this order, as far as it has
// them.
struct BlockExtras {
    std::array<std::string_view, 2> texts;
    uint8_t texts_count = 0;
    bool foreign = false;  // images, embeddings: what such a block means is not known here
};

struct KvEvent {
    enum class Kind { kStored, kRemoved, kCleared, kOther };

    Kind kind = Kind::kOther;
    std::vector<EventHash> hashes;
    std::optional<EventHash> parent;
    std::vector<uint32_t> tokens;  // of EAGLE's pairs the first
    bool odd_tokens = false;       // ids that do not fit in 32 bits stand behind `tokens`
    uint32_t block_tokens = 0;
    KvTier tier = KvTier::kDevice;
    bool remote = false;             // a copy that is not where the events come from
    bool part_of_attention = false;  // sliding windows, state: such groups do not say what prefix is there
    bool has_lora_id = false;
    std::optional<std::string_view> lora_name;
    std::optional<std::string_view> cache_salt;
    std::vector<BlockExtras> extras;  // empty, or one for each block
    std::optional<int64_t> group;
};

struct KvEventBatch {
    double sent_s = 0;  // the sender's clock
    std::vector<KvEvent> events;
};

inline constexpr size_t kEventBytesMax = 32u << 20;
// Of a batch. Decoded, a byte of it may take 40, so not its bytes alone are bounded: with these a batch takes
// at most 200 MB, one of 4 MiB as engines send them some 6 MB.
inline constexpr size_t kBatchEventsMax = 1u << 16;
inline constexpr size_t kBatchBlocksMax = 1u << 20;

// Code::kProtocol with the reason for what is no batch, kTooLarge beyond one of the maxima.
Result<KvEventBatch> decode_kv_events(std::span<const uint8_t> payload);

}  // namespace moonpool
