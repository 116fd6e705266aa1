// What a program that links the C library does not tell it: the cluster token, and which hosts are this one.
#pragma once

#include <string>

#include "base/result.hpp"
#include "wire/secrets.hpp"

namespace moonpool::capi {

struct Token {
    Secrets secrets;
    bool chosen = false;  // by the operator: an engine may be reached from other hosts
};

// The one in MOONPOOL_CLUSTER_TOKEN or MOONPOOL_CLUSTER_TOKEN_FILE, else the one that this user's processes
// on this host share: the same as Moonpool's Python finds.
Result<Token> cluster_token();

// Whether only this host reaches it: a number of the loopback network, or "localhost".
bool is_loopback(const std::string& host);

}  // namespace moonpool::capi
