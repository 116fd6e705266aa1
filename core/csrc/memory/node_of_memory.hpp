// The NUMA node that memory of this process lies on.
#pragma once

namespace moonpool {

// Of the page at an address, which is brought in if it is not there; -1: the kernel does not tell.
int node_of_memory(const void* address);

}  // namespace moonpool
