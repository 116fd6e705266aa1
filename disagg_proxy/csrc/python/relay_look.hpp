// What a relay has counted and what its connections are doing, as Python sees it
// (disagg_proxy/data_plane/counters.py).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "relay/relay.hpp"

namespace moonpool::python {

// Both with the GIL held; they let go of it while the relay's thread looks.
pybind11::dict relay_counters(relay::Relay& relay, uint64_t policy_errors);
pybind11::list relay_clients(relay::Relay& relay);

}  // namespace moonpool::python
