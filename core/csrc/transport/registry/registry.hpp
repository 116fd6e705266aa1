// The transports of this build; an engine may be given others (transport/outside). A new one is a folder
// beside this one and a row here; the engine, its options, its metrics and the conformance suite know no
// other list.
#pragma once

#include <span>
#include <string>

#include "transport/transport.hpp"

namespace moonpool::transport {

// In the order in which an engine tries their links.
std::span<const Factory> registry();

// "loopback, shm, cuda_ipc, rdma, efa, tcp, file and cufile", for people.
std::string names_text(std::span<const std::string> names);

}  // namespace moonpool::transport
