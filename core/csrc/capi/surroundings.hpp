// What a program that links the C library does not tell it: the cluster token, and whether an address is
// memory.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"

namespace moonpool::capi {

struct Token {
    std::string bytes;
    bool chosen = false;  // by the operator: an engine may be reached from other hosts
};

// The one in MOONPOOL_CLUSTER_TOKEN or MOONPOOL_CLUSTER_TOKEN_FILE, else the one that this user's processes
// on this host share: the same as Moonpool's Python finds.
Result<Token> cluster_token();

// Whether only this host reaches it: a number of the loopback network, or "localhost".
bool is_loopback(const std::string& host);

// Fails unless the CPU may read and write all of the range. The kernel is asked, since a caller's wrong
// pointer, or one to a GPU, must not crash the process.
Status check_memory(uint64_t address, uint64_t length);

}  // namespace moonpool::capi
