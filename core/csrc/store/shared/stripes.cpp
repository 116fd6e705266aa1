#include "store/shared/stripes.hpp"

#include <algorithm>
#include <cstring>

#include "base/hmac.hpp"
#include "wire/frame.hpp"

namespace moonpool {

namespace {

constexpr std::string_view kMagic16("\xffmoonpool stripe", 16);
constexpr std::string_view kStripePrefix("\xffmoonpool stripe ", 17);
constexpr size_t kMacAt = 64;

Digest mac_of(std::span<const std::byte> head, std::string_view token, std::string_view key) {
    std::string covered(reinterpret_cast<const char*>(head.data()), head.size());
    covered.append(key);
    auto view = [](std::string_view text) {
        return std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    };
    return hmac_sha256(view(token), view(covered));
}

}  // namespace

std::string Manifest::stripe_name(uint64_t i) const {
    std::string name = group_name();
    name.append(reinterpret_cast<const char*>(&i), sizeof(i));
    return name;
}

std::vector<std::string> Manifest::stripe_names() const {
    std::vector<std::string> names;
    for (uint64_t i = 0; i < std::min(stripes(), kStripesMax); ++i) names.push_back(stripe_name(i));
    return names;
}

std::string Manifest::group_name() const {
    std::string name(kStripePrefix);
    name.append(reinterpret_cast<const char*>(id.data()), id.size());
    return name;
}

bool is_stripe(std::string_view name) { return name.starts_with(kStripePrefix); }

bool may_be_manifest(std::span<const std::byte> bytes) {
    return bytes.size() == kManifestBytes && std::memcmp(bytes.data(), kMagic16.data(), kMagic16.size()) == 0;
}

std::vector<std::byte> encode(const Manifest& manifest, const Secrets& token, std::string_view key) {
    std::vector<std::byte> out;
    out.reserve(kManifestBytes);
    Writer w(out);
    w.bytes(kMagic16.data(), kMagic16.size());
    w.bytes(manifest.id.data(), manifest.id.size());
    w.number(manifest.size);
    w.number(manifest.stripe_bytes);
    w.number(uint64_t{0});
    w.number(uint64_t{0});
    Digest mac = mac_of(out, token.now()->front(), key);
    w.bytes(mac.data(), mac.size());
    return out;
}

std::optional<Manifest> decode_manifest(std::span<const std::byte> bytes, const Secrets& token,
                                        std::string_view key) {
    if (!may_be_manifest(bytes)) return std::nullopt;
    Reader r(bytes);
    r.bytes(kMagic16.size());
    Manifest manifest;
    std::string_view id = r.bytes(manifest.id.size());
    std::memcpy(manifest.id.data(), id.data(), id.size());
    manifest.size = r.number<uint64_t>();
    manifest.stripe_bytes = r.number<uint64_t>();
    if (manifest.stripe_bytes == 0) return std::nullopt;
    std::span<const uint8_t> claimed(reinterpret_cast<const uint8_t*>(bytes.data()) + kMacAt, sizeof(Digest));
    for (const std::string& secret : *token.now()) {
        if (equal_constant_time(mac_of(bytes.first(kMacAt), secret, key), claimed)) return manifest;
    }
    return std::nullopt;
}

std::vector<MemoryRef> slice(std::span<const MemoryRef> parts, uint64_t from, uint64_t size) {
    std::vector<MemoryRef> out;
    for (const MemoryRef& part : parts) {
        if (size == 0) break;
        if (from >= part.bytes) {
            from -= part.bytes;
            continue;
        }
        uint64_t n = std::min(size, part.bytes - from);
        out.push_back(part.sub(from, n));
        size -= n;
        from = 0;
    }
    return out;
}

}  // namespace moonpool
