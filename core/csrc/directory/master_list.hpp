// MasterList: where the masters of one range are reached, as one of them says it (docs/wire_master.md,
// MASTERS). It comes behind the WELCOME of a master, and in a MASTERS frame whenever it changes, to those
// that have asked for it. Bytes of a peer: a list that is too long or cut off is ignored, and so is an
// address that is none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "directory/master_address.hpp"
#include "directory/version.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline constexpr size_t kMastersMax = 8;  // addresses of a list
inline constexpr uint8_t kMastersOfOwner = 1;

struct MasterList {
    Version term = kNoVersion;             // the first version of the owner
    bool of_owner = false;                 // that itself says it
    std::vector<std::string> addresses{};  // the owner first, as far as known
    uint8_t own = 0;                       // which one is the sender's, from 1; 0: none of them

    void write(Writer w) const {
        w.number(term);
        w.number(of_owner ? kMastersOfOwner : uint8_t{0});
        w.number(own);
        w.number(static_cast<uint8_t>(addresses.size()));
        for (const std::string& address : addresses) w.text16(address);
    }
    // False: it is no list. Without the addresses that are none; bytes behind it are of a later version.
    bool read(Reader& r) {
        term = r.number<Version>();
        of_owner = (r.number<uint8_t>() & kMastersOfOwner) != 0;
        own = 0;
        const auto place = r.number<uint8_t>();
        const auto n = r.number<uint8_t>();
        addresses.clear();
        if (!r.ok() || n > kMastersMax || place > n) return false;
        for (uint8_t i = 1; i <= n; ++i) {
            const std::string address(r.text16());
            if (!r.ok()) return false;
            add(address, i == place);
        }
        return true;
    }

    void add(const std::string& address, bool is_own = false) {
        if (addresses.size() == kMastersMax || !is_master_address(address)) return;
        if (std::ranges::find(addresses, address) != addresses.end()) return;
        addresses.push_back(address);
        if (is_own) own = static_cast<uint8_t>(addresses.size());
    }
    std::string own_address() const { return own == 0 ? std::string() : addresses[own - 1u]; }

    friend bool operator==(const MasterList&, const MasterList&) = default;
};

inline void write_masters_frame(std::vector<std::byte>& out, const MasterList& list) {
    size_t at = begin_frame(out, Kind::kMasters, kFlagOneWay, 0);
    list.write(Writer(out));
    finish_frame(out, at);
}

// Of a caller: it takes such frames from now on.
inline void write_masters_question(std::vector<std::byte>& out) {
    finish_frame(out, begin_frame(out, Kind::kMasters, kFlagOneWay, 0));
}

}  // namespace moonpool
