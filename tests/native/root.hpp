// Where the files of the checkout lie that tests read.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace moonpool::testing {

// The checkout's root: the Makefile says where it is, since sources are compiled by relative paths.
inline std::filesystem::path root() {
    const char* said = std::getenv("MOONPOOL_ROOT");
    return said != nullptr ? said : ".";
}

}  // namespace moonpool::testing
