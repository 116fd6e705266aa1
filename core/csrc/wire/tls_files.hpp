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

// Paths of PEM files.
struct TlsFiles {
    std::string cert, key;  // what this side shows
    std::string ca;         // whom it trusts
};

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
    // Of each file: what another one of that name differs in. All 0: there is none.
    using Seen = std::array<std::array<uint64_t, 5>, 3>;
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
