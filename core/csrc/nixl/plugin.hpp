#pragma once

#include "base/result.hpp"
#include "nixl/abi.hpp"

namespace moonpool::nixl {

// What NIXL gets: nullptr, after one sentence on stderr, when `host` says that it is not one that is known.
NixlPlugin* plugin_for(const Status& host);

}  // namespace moonpool::nixl
