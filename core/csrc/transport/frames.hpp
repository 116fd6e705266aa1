// The bodies of the engine's frames (docs/wire_engine.md has the byte tables). Encoders append to a vector;
// decoders answer with nothing when a single byte is missing, too many, or over a limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/identity.hpp"
#include "transport/link.hpp"
#include "transport/region.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport {

inline constexpr uint16_t kVersionWithCards = 2;      // lists regions of kDevice, and asks for them
inline constexpr uint16_t kVersionWithInitiator = 3;  // SHM_OPEN names the initiator
inline constexpr size_t kNameBytesMax = 256;
inline constexpr uint32_t kRowsMax = 512;               // ranges of one TRANSFER
inline constexpr uint64_t kPayloadBytesMax = 8u << 20;  // bytes of its writes, and of its reads
inline constexpr uint32_t kNotifyBytesMax = 1u << 20;   // one message
inline constexpr uint32_t kControlBytesMax = 4u << 20;  // any other frame of the engine
inline constexpr uint32_t kFencesMax = 64;
inline constexpr size_t kOffersMax = 32;  // of WELCOME
inline constexpr size_t kOfferBytesMax = 4096;

// What WELCOME says behind the proof.
std::vector<std::byte> encode_welcome(const PeerInfo& info);
std::optional<PeerInfo> decode_welcome(std::span<const std::byte> body);

struct Hello {
    VersionRange versions = kEngineVersions;
    SegmentId segment{};   // of the initiator
    SegmentId expected{};  // of the target, as it said in WELCOME
    uint32_t channel = 0;  // the initiator's number of this connection
    std::string name;      // of the initiator
};
void encode(Writer& w, const Hello& hello);
std::optional<Hello> decode_hello(Reader r);

// One region, as a peer knows it.
struct RegionRow {
    uint64_t id = 0;
    uint64_t address = 0;
    uint64_t length = 0;
    MemoryKind kind = MemoryKind::kHost;
    std::string location;  // a label; see Region

    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
};
// Asks a peer of that version for its regions: the question's body.
std::vector<std::byte> regions_question(const PeerInfo& peer);
// Of shared memory: the same for what has changed since that edition of the list; 0: for all of it.
std::vector<std::byte> regions_question(const PeerInfo& peer, uint64_t edition);
struct RegionsQuestion {
    uint16_t version = 1;             // of the initiator
    std::optional<uint64_t> edition;  // that it knows; nothing: it asks for the list alone
};
std::optional<RegionsQuestion> decode_regions_question(Reader r);
// Those that an initiator of that version can read.
void encode_regions(Writer& w, const RegionList& regions, uint16_t version);
std::optional<std::vector<RegionRow>> decode_regions(Reader r);
// The answer to a question with an edition.
void encode_changes(Writer& w, const RegionChanges& changes, uint16_t version);
struct ChangedRows {
    uint64_t edition = 0;  // 0: the peer has none, and must not be asked for changes
    bool whole = true;     // as in RegionChanges
    std::vector<RegionRow> added;
    std::vector<RegionChanges::Removed> removed;
};
std::optional<ChangedRows> decode_changes(Reader r);

// TRANSFER: u32 rows, u32 zero, rows, the bytes of the writes in the order of their rows.
struct TransferRow {
    uint64_t address = 0;
    uint32_t length = 0;
    uint32_t direction = 0;
};
static_assert(sizeof(TransferRow) == 16);
inline constexpr size_t kTransferHeadBytes = sizeof(FrameHeader) + 8;

// Its answer: u32 rows, u32 refused; only when some were refused a byte for each row (0 done, 1 refused), u16
// code and the text16 of the first; then the bytes of the reads that were done.
inline constexpr size_t kAnswerHeadBytes = sizeof(FrameHeader) + 8;

}  // namespace moonpool::transport
