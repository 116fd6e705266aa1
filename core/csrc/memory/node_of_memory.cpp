#include "memory/node_of_memory.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace moonpool {

// By the system call: no libnuma is needed.
int node_of_memory(const void* address) {
    constexpr unsigned long kNode = 1, kOfAddress = 2;  // MPOL_F_NODE, MPOL_F_ADDR
    int node = -1;
    if (::syscall(SYS_get_mempolicy, &node, nullptr, 0, address, kNode | kOfAddress) != 0) return -1;
    return node;
}

}  // namespace moonpool
