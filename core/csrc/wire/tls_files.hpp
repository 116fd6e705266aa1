// FollowedTls: the files of one side of TLS as a context of OpenSSL that follows them. They are looked at for
// each new stream: where one was replaced, streams from then on use the new ones, and those that are open
// keep what they have. Files that cannot be used, as a new certificate whose key has yet to come, change
// nothing until they change again.
#pragma once

#include <sys/stat.h>

#include <array>
#include <functional>
#include <string>
#include <utility>

#include "base/mutex.hpp"
#include "base/result.hpp"

struct ssl_st;
struct ssl_ctx_st;

namespace moonpool {

class OpenSsl;

// What TLS is for: the settings that sentences for the operator name, and what is spoken inside.
struct TlsUse {
    const char *cert, *key, *ca;  // the settings of the files
    // Remedies behind ';' or a word, of a peer's certificate that has expired, of one for another name, of an
    // own one that the peer does not accept.
    const char *expired, *misnamed, *unaccepted;
    bool http = false;                            // HTTP/1.1, which the two sides agree on (ALPN)
    const char* setting = "cluster.tls_control";  // which turns it on
};

inline constexpr TlsUse kControlTls{
    "cluster.tls_cert",
    "cluster.tls_key",
    "cluster.tls_ca",
    "make a new one (cluster.tls_cert there)",
    ", or set cluster.tls_name to one",
    "set cluster.tls_control = \"mutual\" and cluster.tls_cert and tls_key to one that its cluster.tls_ca "
    "vouches for"};

inline constexpr TlsUse kDataTls{"cluster.tls_cert",
                                 "cluster.tls_key",
                                 "cluster.tls_ca",
                                 "make a new one (cluster.tls_cert there)",
                                 ", or set cluster.tls_data_name to one",
                                 "set cluster.tls_data = \"mutual\" and cluster.tls_cert and tls_key to one "
                                 "that its cluster.tls_ca vouches "
                                 "for",
                                 false,
                                 "cluster.tls_data"};

// Paths of PEM files.
struct TlsFiles {
    std::string cert, key;  // what this side shows
    std::string ca;         // whom it trusts
    const TlsUse* use = &kControlTls;
    // Told of files that changed and cannot be used, of a process without a log; null: see take_trouble().
    void (*tell)(const std::string& trouble) = nullptr;
};

// An error: others can read the key. FollowedTls checks each key but the first, which the caller does.
Status check_key(const TlsFiles& files);

class FollowedTls {
   public:
    // make: a new context of the files as they are; its owner frees it.
    using Make = std::function<Result<ssl_ctx_st*>()>;
    FollowedTls(const OpenSsl& lib, TlsFiles files, Make make)
        : lib_(lib), files_(std::move(files)), make_(std::move(make)) {}
    ~FollowedTls();
    FollowedTls(const FollowedTls&) = delete;

    // Before the first stream.
    Status load();
    // A stream of the files as they are now; nullptr: OpenSSL has no memory left. Any thread.
    ssl_st* open();
    // Why the files that are there now are not in use, told once; empty: they are.
    std::string take_trouble();

   private:
    // Of each file: what another one of that name differs in, or the same one whose mode was changed. All 0:
    // there is none.
    using Seen = std::array<std::array<uint64_t, 8>, 3>;
    Seen look() const;

    const OpenSsl& lib_;
    const TlsFiles files_;
    const Make make_;
    Mutex mutex_;
    ssl_ctx_st* context_ GUARDED_BY(mutex_) = nullptr;
    Seen seen_ GUARDED_BY(mutex_){};
    std::string trouble_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
