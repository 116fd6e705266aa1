// Which NIXL loads the plugin. Its version of the plugin interface does not tell: 1 was the number of several
// classes that differ in their virtual functions, and a wrong one of them would be called.
#pragma once

#include <functional>
#include <string>

#include "base/result.hpp"

namespace moonpool::nixl {

// Whether the library exports a function of this (mangled) name.
using Exports = std::function<bool(const char* name)>;

// Fails unless the functions of nixlBackendEngine that are not abstract are those of abi.hpp, with their
// arguments. NIXL's library has a copy of each.
Status check_interface(const Exports& exports);

// The same of the libnixl.so that this process has loaded.
Status check_loaded();

}  // namespace moonpool::nixl
