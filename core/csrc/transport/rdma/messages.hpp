// What two engines say to each other about RDMA (docs/wire_engine.md): the offer in the handshake, and the
// questions of the initiator. Decoders answer with nothing when a byte is missing, too many, or over a limit.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transport/rdma/keys.hpp"
#include "transport/rdma/queue_pair.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::rdma {

inline constexpr const char* kName = "rdma";  // in the registry and on the wire
inline constexpr size_t kPortsMax = 16;       // of an engine
inline constexpr size_t kRangesMax = 128;     // of one question for keys
inline constexpr size_t kChunksMax = 1u << 16;

// A port in an offer.
struct OfferedPort {
    uint8_t device = 0;  // ports of one device share its keys
    PortAddress address;
    std::string name;
};
std::vector<std::byte> encode_offer(const std::vector<std::shared_ptr<Port>>& ports);
std::optional<std::vector<OfferedPort>> decode_offer(std::span<const std::byte> body);

enum class Question : uint8_t { kKeys = 0, kConnect = 1, kEnd = 2 };

// CONNECT: a queue pair for the initiator's, at that port of the target. The answer is an Endpoint.
struct Connect {
    uint32_t rail = 0;  // the initiator's number of the pair; the one before with that number ends
    uint8_t port = 0;   // of the target, in its offer
    Endpoint initiator;
};
std::vector<std::byte> connect_question(const Connect& connect);
std::vector<std::byte> end_question(uint32_t rail);
void encode(Writer& w, const Endpoint& endpoint);
Endpoint decode_endpoint(Reader& r);

// KEYS: of the regions that have these ranges.
struct Range {
    uint64_t address = 0, length = 0;
};
std::vector<std::byte> keys_question(const std::vector<Range>& ranges);

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
void encode(Writer& w, const Region& region, const KeyedRegion* keyed);
std::optional<std::vector<RemoteRegion>> decode_keys(Reader r);

}  // namespace moonpool::transport::rdma
