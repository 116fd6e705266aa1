// How many connections a process can have, whatever its settings say: as open files and memory allow.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace moonpool {

struct ConnectionPlaces {
    uint64_t most = 0;
    std::string because;  // "as many as ...", with the remedy
};

// have: how many there are; their files and memory are taken already. kept_files: of the limit of open files,
// for all else. available_memory: in bytes, null: it is not asked.
ConnectionPlaces connection_places(uint64_t have, uint64_t kept_files,
                                   const std::function<uint64_t()>& available_memory);

}  // namespace moonpool
