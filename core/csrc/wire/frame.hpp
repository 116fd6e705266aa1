// The frame: what travels on every Moonpool connection (docs/wire.md has the byte tables). Little-endian.
//
//   0  u32 magic "MPL1"   4  u8 version   5  u8 kind   6  u16 flags
//   8  u32 payload bytes  12 u16 lowest, u16 highest   16 u64 request id, echoed by the answer
//
// lowest and highest: in CHALLENGE and AUTH the versions of the wire format that the sender speaks, by which
// both sides take the same one; zero elsewhere, and in those of the release before, which speaks version 1.
// `version` is that of the header, 1 in each release; in AUTH alone it is the version that the caller took.
//
// Reader and Writer never read or write outside their span; a Reader that ran short stays failed (`ok()`), so
// that a parser can check once at the end.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.hpp"
#include "wire/version_range.hpp"

namespace moonpool {

static_assert(std::endian::native == std::endian::little, "the wire format is read and written in place");

inline constexpr uint32_t kMagic = 0x314C504D;      // "MPL1"
inline constexpr uint8_t kVersion = 1;              // of the header
inline constexpr VersionRange kWireVersions{1, 1};  // that this release speaks
inline constexpr const char* kWireFormat = "the wire format";
static_assert(kWireVersions.highest <= UINT8_MAX, "AUTH says the version that was taken in a byte");

enum class Kind : uint8_t {
    kError = 1,      // u16 code, text: the connection (request id 0) or the request failed
    kChallenge = 2,  // node -> client, the first frame
    kAuth = 3,       // client -> node
    kWelcome = 4,    // node -> client, with the file descriptors of arena and index

    kOpenSpace = 16,
    kLease = 17,    // memory to write into
    kReturn = 18,   // one-way: a slab is done with
    kCommit = 19,   // objects written into leased memory become visible
    kLookup = 20,   // exists, pin, longest prefix
    kRelease = 21,  // one-way: a pin is done with
    kTouch = 22,    // one-way: what was read straight from shared memory
    kRemove = 23,
    kList = 24,
    kStat = 25,
    kRead = 26,      // bytes of objects over TCP
    kPut = 27,       // objects over TCP, bytes and all
    kDescribe = 28,  // size and state of objects, without a use of them
    kRelay = 29,     // a question to the master, which the node passes on

    // 32 to 47: the master (docs/wire_master.md)
    kJoin = 32,      // node -> master: its identity
    kDelta = 33,     // node -> master, one-way: what it holds now, or no longer
    kBeat = 34,      // node -> master: it lives
    kMembers = 35,   // client -> master: which nodes are in the pool
    kLocate = 36,    // which nodes hold these keys
    kPlace = 37,     // where there is room
    kForget = 38,    // these keys were removed
    kLeave = 39,     // node -> master, one-way: it stops serving
    kRemovals = 40,  // node -> master, one-way: removals that a new master may not know
    kOrdered = 41,   // a removal or replacement that a LOCATE began is carried out
    kMirror = 42,    // master -> its standby, one-way: the order of removals; first: standby -> master
    kMirrored = 43,  // standby -> master, one-way: it has heard that
    kHandOver = 44,  // standby -> master, one-way: it asks to be the owner; and back: why not
    kMasters = 45,   // caller -> master, one-way: it takes these; and back: where the masters are

    // 48..63: the transfer engine (docs/wire_engine.md)
    kEngineHello = 48,     // initiator -> target, the first frame of a connection
    kEngineRegions = 49,   // what the target has registered
    kEngineTransfer = 50,  // ranges, the bytes of the writes; the answer brings those of the reads
    kEngineNotify = 51,    // a message for the peer's user
    kEngineFence = 52,     // what came by that other connection is not to be written any more
    kShmOpen = 53,         // over the Unix socket: proves the host, answers with the gate's descriptor
    kShmMap = 54,          // over the Unix socket: the descriptor of one region's memory
    kCudaRegions = 55,     // over the Unix socket: the handles of memory of cards
    kEngineAsk = 56,       // a question for one transport of the target
};
inline constexpr uint16_t kFlagAnswer = 1;
inline constexpr uint16_t kFlagOneWay = 2;

struct FrameHeader {
    uint32_t magic = kMagic;
    uint8_t version = kVersion;
    Kind kind = Kind::kError;
    uint16_t flags = 0;
    uint32_t length = 0;
    uint16_t lowest = 0;
    uint16_t highest = 0;
    uint64_t request_id = 0;
};
static_assert(sizeof(FrameHeader) == 24);

class Writer {
   public:
    explicit Writer(std::vector<std::byte>& out) : out_(out) {}

    template <class T>
    void number(T value) {
        static_assert(std::is_trivially_copyable_v<T>);
        size_t at = out_.size();
        out_.resize(at + sizeof(T));
        std::memcpy(out_.data() + at, &value, sizeof(T));
    }
    void bytes(const void* data, size_t size) {
        const auto* begin = static_cast<const std::byte*>(data);
        out_.insert(out_.end(), begin, begin + size);
    }
    void text16(std::string_view text) {
        number(static_cast<uint16_t>(text.size()));
        bytes(text.data(), text.size());
    }

    // What was written is not yet sent: a count that is known only at the end can be put in its place.
    size_t position() const { return out_.size(); }
    template <class T>
    void number_at(size_t position, T value) {
        std::memcpy(out_.data() + position, &value, sizeof(T));
    }
    void cut(size_t position) { out_.resize(position); }

   private:
    std::vector<std::byte>& out_;
};

class Reader {
   public:
    explicit Reader(std::span<const std::byte> in) : in_(in) {}

    template <class T>
    T number() {
        T value{};
        if (const std::byte* from = take(sizeof(T))) std::memcpy(&value, from, sizeof(T));
        return value;
    }
    std::string_view bytes(size_t size) {
        const std::byte* from = take(size);
        return from != nullptr ? std::string_view(reinterpret_cast<const char*>(from), size)
                               : std::string_view();
    }
    // Names of objects and the like, any bytes; Writer::text16 writes them too.
    std::string_view bytes16() { return bytes(number<uint16_t>()); }
    // What is shown to people: a frame whose text is no UTF-8 is not as documented.
    std::string_view text16() {
        std::string_view text = bytes16();
        if (is_utf8(text)) return text;
        fail();
        return {};
    }

    bool ok() const { return ok_; }
    bool done() const { return ok_ && in_.empty(); }
    size_t left() const { return in_.size(); }

   private:
    const std::byte* take(size_t size) {
        if (size > in_.size()) {
            fail();
            return nullptr;
        }
        const std::byte* from = in_.data();
        in_ = in_.subspan(size);
        return from;
    }

    void fail() {
        ok_ = false;
        in_ = {};
    }

    std::span<const std::byte> in_;
    bool ok_ = true;
};

// Starts a frame in `out` and gives the place of its header; finish_frame writes the length once it is known.
inline size_t begin_frame(std::vector<std::byte>& out, Kind kind, uint16_t flags, uint64_t request_id) {
    size_t at = out.size();
    FrameHeader header;
    header.kind = kind;
    header.flags = flags;
    header.request_id = request_id;
    Writer(out).number(header);
    return at;
}

inline void finish_frame(std::vector<std::byte>& out, size_t at) {
    auto length = static_cast<uint32_t>(out.size() - at - sizeof(FrameHeader));
    std::memcpy(out.data() + at + offsetof(FrameHeader, length), &length, sizeof(length));
}

// ---- the versions of a CHALLENGE or an AUTH

// Starts such a frame. version: of an AUTH, the one that was taken.
inline size_t begin_handshake_frame(std::vector<std::byte>& out, Kind kind, uint64_t request_id,
                                    VersionRange own, uint16_t version = kVersion) {
    size_t at = begin_frame(out, kind, 0, request_id);
    Writer w(out);
    w.number_at(at + offsetof(FrameHeader, version), static_cast<uint8_t>(version));
    w.number_at(at + offsetof(FrameHeader, lowest), own.lowest);
    w.number_at(at + offsetof(FrameHeader, highest), own.highest);
    return at;
}

// Of a caller that speaks no version of the CHALLENGE: no body, for the sentence of the other side's
// operator.
inline std::vector<std::byte> auth_without_version(VersionRange own) {
    std::vector<std::byte> out;
    finish_frame(out, begin_handshake_frame(out, Kind::kAuth, 1, own, own.lowest));
    return out;
}

// A peer that says no range speaks the one version of its header.
inline VersionRange versions_of(const FrameHeader& header) {
    if (header.lowest == 0 && header.highest == 0) return {header.version, header.version};
    return {header.lowest, header.highest};
}

// What the caller of a connection took, when the AUTH came.
inline Result<uint16_t> agree_on_auth(const FrameHeader& auth, const Speaker& own) {
    const Speaker caller{"the caller", versions_of(auth)};
    Result<uint16_t> version = agree(own, caller, kWireFormat);
    if (version && *version != auth.version) {
        return Error{Code::kProtocol, "the caller took version " + std::to_string(auth.version) +
                                          " of the wire format, and version " + std::to_string(*version) +
                                          " is the highest that both speak"};
    }
    return version;
}

// Of a frame whose header is of another version: its sender says no range, and speaks that one alone.
inline Error other_version(const FrameHeader& header, const Speaker& own, const std::string& peer) {
    return none_in_common(own, {peer, {header.version, header.version}}, kWireFormat);
}

}  // namespace moonpool
