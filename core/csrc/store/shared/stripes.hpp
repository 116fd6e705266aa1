// Stripes: an object too large for one node lies in pieces on several. Under its key stands a manifest, a
// small object that says how many pieces there are and what they are called. What marks it as one is a mac
// with the cluster token over its key and its content: no bytes that a user stores are ever taken for a
// manifest.
//
//   0   magic (16)   16 id (16, random)   32 u64 size   40 u64 bytes of a stripe   48 u64 zero   56 u64 zero
//   64  HMAC-SHA256(token, magic ‖ … ‖ zero ‖ key) (32)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memory/memory_ref.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

inline constexpr uint64_t kManifestBytes = 96;
inline constexpr uint64_t kStripesMax = 4096;  // of one object

struct Manifest {
    std::array<uint8_t, 16> id{};
    uint64_t size = 0;
    uint64_t stripe_bytes = 0;

    uint64_t stripes() const { return (size + stripe_bytes - 1) / stripe_bytes; }
    // False: it is of a release with a higher limit; memory must not be reserved by its word.
    bool within_limits() const { return stripes() <= kStripesMax; }
    // Names that no list shows; unique for this life of the key.
    std::string stripe_name(uint64_t i) const;
    std::vector<std::string> stripe_names() const;  // of kStripesMax at most
    // What the stripes on one node, and the manifest where it lies with some, are a group by: one alone is of
    // no use.
    std::string group_name() const;
    uint64_t bytes_of(uint64_t i) const { return std::min(stripe_bytes, size - i * stripe_bytes); }

    friend bool operator==(const Manifest&, const Manifest&) = default;
};

// Whether an object begins as a manifest does: then the client that removes it gets its bytes. One that is by
// no secret of the cluster is a miss: it was put under one that has been replaced, or is forged.
bool may_be_manifest(std::span<const std::byte> bytes);
// The bytes of such an object that was removed, of item number `item` of the call.
struct RemovedManifest {
    size_t item = 0;
    std::array<std::byte, kManifestBytes> bytes{};
};

// Under the first of the secrets.
std::vector<std::byte> encode(const Manifest& manifest, const Secrets& token, std::string_view key);
// What `bytes` are under that key: a manifest by any of the secrets, or an object of a user.
std::optional<Manifest> decode_manifest(std::span<const std::byte> bytes, const Secrets& token,
                                        std::string_view key);
bool is_stripe(std::string_view name);

// Where [from, from + size) of an object lies in its parts.
std::vector<MemoryRef> slice(std::span<const MemoryRef> parts, uint64_t from, uint64_t size);

}  // namespace moonpool
