// Ranges of shards: in a pool of several masters each owns one of them, with an order of removals of its own.
// Pure values.
//
//   shard   0 ........ 255 | 256 ..... 511 | 512 ..... 767 | 768 .... 1023
//   of 4        range 0    |    range 1    |    range 2    |    range 3
//
// A version says something only beside another one of the same range. The number of ranges is the same for
// all masters, nodes and clients of a pool, and stays while the pool runs.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "directory/types.hpp"
#include "directory/version.hpp"

namespace moonpool {

struct Range {
    uint32_t index = 0, count = 1;

    bool is_all() const { return count == 1; }
    bool is_sound() const { return count >= 1 && count <= kRangesMax && index < count; }
    bool contains(const Hash128& hash) const { return is_all() || range_of(hash, count) == index; }
    std::string text() const { return std::to_string(index) + "/" + std::to_string(count); }

    // "0/4"; none: it is no range.
    static std::optional<Range> parse(std::string_view text) {
        Range range;
        const char* end = text.data() + text.size();
        auto index = std::from_chars(text.data(), end, range.index);
        if (index.ec != std::errc() || index.ptr == end || *index.ptr != '/') return std::nullopt;
        auto count = std::from_chars(index.ptr + 1, end, range.count);
        if (count.ec != std::errc() || count.ptr != end || !range.is_sound()) return std::nullopt;
        return range;
    }

    friend bool operator==(const Range&, const Range&) = default;
};

// The lists of addresses of each range's masters: "10.0.0.1:7700,10.0.0.2:7700;10.0.0.3:7700".
inline std::vector<std::string> split_ranges(std::string_view list) {
    std::vector<std::string> ranges;
    for (size_t at = 0; at <= list.size();) {
        size_t end = std::min(list.find(';', at), list.size());
        if (end != at) ranges.emplace_back(list.substr(at, end - at));
        at = end + 1;
    }
    return ranges;
}

// A version of each range: up to which a node is right, or the newest that a client has heard of.
class RangeVersions {
   public:
    explicit RangeVersions(uint32_t count = 1) : count_(std::clamp(count, 1u, kRangesMax)) {}
    static RangeVersions of_one(Version version) {
        RangeVersions versions;
        versions.raise(0, version);
        return versions;
    }

    uint32_t count() const { return count_; }
    Version at(uint32_t range) const { return versions_[range]; }
    Version of(const Hash128& hash) const { return versions_[range_of(hash, count_)]; }

    void raise(uint32_t range, Version version) { versions_[range] = std::max(versions_[range], version); }
    void raise(const Hash128& hash, Version version) { raise(range_of(hash, count_), version); }
    // One that knows nothing takes the ranges of the other; another count says nothing to one that does.
    void raise(const RangeVersions& other) {
        if (other.count_ != count_) {
            if (count_ == 1 && is_none()) *this = other;
            return;
        }
        for (uint32_t range = 0; range < count_; ++range) raise(range, other.versions_[range]);
    }
    // Takes those of the other where it has none.
    void fill(const RangeVersions& other) {
        if (count_ == 1 && is_none()) *this = other;
        for (uint32_t range = 0; range < count_ && other.count_ == count_; ++range) {
            if (versions_[range] == kNoVersion) raise(range, other.versions_[range]);
        }
    }
    bool is_none() const {
        return std::ranges::all_of(versions_, [](Version version) { return version == kNoVersion; });
    }

    friend bool operator==(const RangeVersions&, const RangeVersions&) = default;

   private:
    uint32_t count_;
    std::array<Version, kRangesMax> versions_{};
};

}  // namespace moonpool
