// TenantLimits: what a tenant may have at this node (cluster.tenants_file). Without a limit it is as if
// there were none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace moonpool {

struct TenantLimits {
    std::optional<uint64_t> dram_min;     // bytes of memory that are its own
    std::optional<uint64_t> dram_max;     // the most memory, with what it borrows
    std::optional<uint64_t> ssd_max;      // bytes of all SSD directories
    std::optional<uint64_t> pins_max;     // bytes of objects that its clients have pinned at one time
    std::optional<uint64_t> bytes_per_s;  // read and put through the node

    friend bool operator==(const TenantLimits&, const TenantLimits&) = default;
};

using LimitsByTenant = std::map<std::string, TenantLimits, std::less<>>;

}  // namespace moonpool
