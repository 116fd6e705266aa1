// MasterState: what a master says of itself to each process with the cluster token, also where it serves no
// clients. It is the service's part of WELCOME of the service "master"; the connection then ends.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"
#include "directory/master_list.hpp"
#include "directory/master_pair.hpp"
#include "directory/ranges.hpp"
#include "directory/version.hpp"
#include "wire/dial.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline constexpr std::string_view kServiceMaster = "master";

struct MasterState {
    MasterRole role = MasterRole::kOwner;
    bool attached = false;        // the other one of the two is there
    bool is_whole = false;        // the standby knows all
    uint32_t nodes = 0;           // that are not gone
    uint64_t lag_ms = 0;          // for how long the standby has owed its word
    uint64_t rows = 0;            // of the directory
    Version first = kNoVersion;   // none that it gave is earlier
    Version newest = kNoVersion;  // that it has given, or heard of
    std::string other;            // the name of the standby; of a standby the address of its owner
    Range range{};                // of the shards
    MasterList masters{};         // where this range's are reached, as nodes and clients are told

    void write(Writer& w) const;
    static MasterState read(Reader& r);  // r.ok() is false where it ends early
};

// Of the master at options.address; options.service is not looked at.
Result<MasterState> ask_master_state(DialOptions options);

}  // namespace moonpool
