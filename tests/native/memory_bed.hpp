// What a process tries that was given a descriptor to read only.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/fd.hpp"

namespace moonpool::testing {

// By root, or the file's own user after a chmod(2); others cannot open it again at all.
inline void check_not_writable_again(const Fd& read_only) {
    struct stat what {};
    REQUIRE(::fstat(read_only.get(), &what) == 0);
    CHECK((what.st_mode & 0777) == 0400);
    REQUIRE(::fchmod(read_only.get(), 0600) == 0);
    Fd again(::open(("/proc/self/fd/" + std::to_string(read_only.get())).c_str(), O_RDWR | O_CLOEXEC));
    REQUIRE(again.valid());
    CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0) == MAP_FAILED);
    uint64_t word = 1;
    CHECK(::pwrite(again.get(), &word, sizeof(word), 0) < 0);
    CHECK(::ftruncate(again.get(), 0) != 0);
}

}  // namespace moonpool::testing
