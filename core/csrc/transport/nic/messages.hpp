// What the two sides of a link over NICs say to each other (docs/wire_engine.md): the questions of the
// initiator, each of them a frame for one transport. Decoders answer with nothing when a byte is missing, too
// many, or over a limit.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/nic/keys.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::nic {

inline constexpr size_t kDevicesMax = 16;  // of an engine
inline constexpr size_t kRangesMax = 128;  // of one question for keys
inline constexpr size_t kChunksMax = 1u << 16;

enum class Question : uint8_t { kKeys = 0, kConnect = 1, kEnd = 2 };

// CONNECT: an end of a connection at that port of the target.
// rail: the initiator's number of it; the one before with that number ends.
// initiator, and the answer: in a form of the transport's own.
std::vector<std::byte> connect_question(std::string_view transport, uint32_t rail, uint8_t port,
                                        std::span<const std::byte> initiator);
std::vector<std::byte> end_question(std::string_view transport, uint32_t rail);

// KEYS: of the regions that have these ranges.
struct Range {
    uint64_t address = 0, length = 0;
};
std::vector<std::byte> keys_question(std::string_view transport, const std::vector<Range>& ranges);

// A region of the peer with the keys that it has by now.
struct RemoteRegion {
    uint64_t id = 0, address = 0, length = 0;
    MemoryKind kind = MemoryKind::kHost;
    uint64_t chunk_bytes = 0;
    uint32_t devices = 0;
    std::string why_refused;
    std::vector<Key> keys;  // of chunk c for device d at [c * devices + d]; only `remote` is known

    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
};
// A key on the wire is a number of 32 or 64 bits, as the transport has it.
enum class KeySize : uint8_t { k32 = 4, k64 = 8 };
void encode(Writer& w, const Region& region, const KeyedRegion* keyed, KeySize size);
std::optional<std::vector<RemoteRegion>> decode_keys(Reader r, KeySize size);

}  // namespace moonpool::transport::nic
