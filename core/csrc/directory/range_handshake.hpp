// How a master of one of several ranges and its peers find out that they mean the same range
// (docs/wire_master.md): these ask for a service of another name, and its WELCOME says which range the master
// has. A peer of the release before asks for the plain service, and is refused there.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "directory/master_list.hpp"
#include "directory/ranges.hpp"
#include "wire/dial.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline std::string service_of_ranges(std::string_view service) { return std::string(service) + "-range"; }

// A process names its range to a node that relays, as the node has a way to the masters of each.
inline std::string relayed_service(std::string_view service, const Range& range) {
    if (range.is_all()) return std::string(service);
    return service_of_ranges(service) + "-" + range.text();
}
// The other way round. None: it is no such name.
inline std::optional<Range> relayed_range(std::string_view service, std::string_view name) {
    if (name == service) return Range{};
    const std::string prefix = service_of_ranges(service) + "-";
    if (!name.starts_with(prefix)) return std::nullopt;
    std::optional<Range> range = Range::parse(name.substr(prefix.size()));
    if (range && range->is_all()) return std::nullopt;
    return range;
}

inline constexpr std::ptrdiff_t kRangeBytes = 4;
inline void write_range(Writer& w, const Range& range) {
    w.number(static_cast<uint16_t>(range.index));
    w.number(static_cast<uint16_t>(range.count));
}
inline Range read_range(Reader& r) {
    Range range;
    range.index = r.number<uint16_t>();
    range.count = r.number<uint16_t>();
    return range;
}

// Of a master with one of several ranges, to a peer that asks for the plain service.
inline Error range_needed(const Range& has) {
    return Error{Code::kInvalidArgument,
                 "this master has range " + has.text() +
                     " of the shards, and the caller expects one master for all of them: set cluster.master "
                     "to the masters of all " +
                     std::to_string(has.count) +
                     " ranges, with semicolons between the ranges, and run this release there"};
}
inline Error wrong_range(const std::string& peer, const Range& has, const Range& expected) {
    return Error{Code::kInvalidArgument, "the master at " + peer + " has range " + has.text() +
                                             " of the shards, and range " + expected.text() +
                                             " is expected there: set master.range there, or correct the "
                                             "order and number of the ranges in cluster.master"};
}

// With `to`, but for the service, which is that of a pool of one range. What is left of the WELCOME is empty,
// of a master of the release before, or a MasterList (masters_of).
inline Result<Dialed> dial_range(DialOptions to, const Range& expected) {
    if (!expected.is_all()) to.service = service_of_ranges(to.service);
    Result<Dialed> dialed = dial(to);
    if (!dialed) return dialed;
    std::vector<std::byte>& rest = dialed->welcome;
    if (!expected.is_all()) {
        Reader welcome(rest);
        Range has = read_range(welcome);
        if (!welcome.ok()) return Error{Code::kProtocol, to.address + " does not say which range it has"};
        if (has != expected) return wrong_range(to.address, has, expected);
        rest.erase(rest.begin(), rest.begin() + kRangeBytes);
    }
    return dialed;
}

inline std::optional<MasterList> masters_of(std::span<const std::byte> welcome) {
    MasterList list;
    Reader r(welcome);
    if (welcome.empty() || !list.read(r)) return std::nullopt;
    return list;
}

}  // namespace moonpool
