// VersionRange: the versions of a format that a process speaks. Each side of a handshake says its own, and
// both take the highest in common, so that releases next to each other work together whichever calls the
// other. Where there is none, both say so in one sentence (none_in_common).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.hpp"

namespace moonpool {

struct VersionRange {
    uint16_t lowest = 1;
    uint16_t highest = 1;

    bool valid() const { return lowest <= highest; }
    bool holds(uint16_t version) const { return version >= lowest && version <= highest; }
    std::string text() const {
        if (lowest == highest) return "version " + std::to_string(lowest);
        return "versions " + std::to_string(lowest) + " to " + std::to_string(highest);
    }
    friend bool operator==(const VersionRange&, const VersionRange&) = default;
};

inline std::optional<uint16_t> highest_in_common(VersionRange one, VersionRange other) {
    const uint16_t highest = std::min(one.highest, other.highest);
    if (!one.holds(highest) || !other.holds(highest)) return std::nullopt;
    return highest;
}

// A side of a handshake, as the sentence names it: "this node", "the caller", an address.
struct Speaker {
    std::string name;
    VersionRange versions;
};

// The older of the two is the one to upgrade. format: as "the wire format".
inline Error none_in_common(const Speaker& own, const Speaker& peer, const std::string& format) {
    const Speaker& older = own.versions.highest < peer.versions.highest ? own : peer;
    return Error{Code::kProtocol, own.name + " speaks " + own.versions.text() + " of " + format + ", " +
                                      peer.name + " " + peer.versions.text() + ", none in common; upgrade " +
                                      older.name + ", since only adjacent releases work together"};
}

// The version that both take.
inline Result<uint16_t> agree(const Speaker& own, const Speaker& peer, const std::string& format) {
    if (!peer.versions.valid()) {
        return Error{Code::kProtocol, peer.name + " says a range of versions of " + format + " that is none"};
    }
    if (std::optional<uint16_t> version = highest_in_common(own.versions, peer.versions)) return *version;
    return none_in_common(own, peer, format);
}

}  // namespace moonpool
