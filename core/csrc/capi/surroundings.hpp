// What a program that links the C library does not tell it: the cluster token, the TLS of data connections,
// and which hosts are this one.
#pragma once

#include <memory>
#include <string>

#include "base/result.hpp"
#include "wire/secrets.hpp"
#include "wire/tls.hpp"

namespace moonpool::capi {

struct Token {
    Secrets secrets;
    bool chosen = false;  // by the operator: an engine may be reached from other hosts
};

// The one in MOONPOOL_CLUSTER_TOKEN or MOONPOOL_CLUSTER_TOKEN_FILE, else the one that this user's processes
// on this host share: the same as Moonpool's Python finds.
Result<Token> cluster_token();

struct DataTls {
    std::shared_ptr<const TlsServer> server;  // of connections that come; null: in plain
    std::shared_ptr<const TlsClient> client;  // of those that are made; null: in plain
};

// By MOONPOOL_CLUSTER_TLS_DATA and the other variables of [cluster] that it needs, as Moonpool's Python reads
// them. A configuration file is not read.
Result<DataTls> data_tls();

// Whether only this host reaches it: a number of the loopback network, or "localhost".
bool is_loopback(const std::string& host);

}  // namespace moonpool::capi
