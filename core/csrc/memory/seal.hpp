// Memory files that other processes get by a descriptor.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/result.hpp"

namespace moonpool {

// A process that has a descriptor can open the file again, by /proc/self/fd, with any mode that the file's
// permissions allow. A process of another user cannot then: what it was given to read it only reads.
inline Status keep_private(int fd) {
    if (::fchmod(fd, S_IRUSR) != 0) return os_error("fchmod of a memfd");
    return success();
}

// Its size stays, and so do the seals. once_mapped: no process can write to it any more, but by the mappings
// that there are; where the kernel is older than 5.1 only keep_private() holds.
inline Status seal_memory(int fd, bool once_mapped) {
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (once_mapped && ::fcntl(fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) == 0) return success();
    if (once_mapped && errno != EINVAL) return os_error("sealing a memfd");
    if (::fcntl(fd, F_ADD_SEALS, seals) != 0) return os_error("sealing a memfd");
    return success();
}

}  // namespace moonpool
