// The certificates of the tests, tests/core/certificates, as the two sides of TLS.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>

#include "root.hpp"
#include "wire/tls.hpp"

namespace moonpool::testing {

inline std::string certificate(const std::string& name) {
    return root() / "tests" / "core" / "certificates" / (name + ".pem");
}

// Shows `name`; asks callers for a certificate when `mutual`.
inline std::shared_ptr<const TlsServer> tls_server(const std::string& name = "master", bool mutual = false) {
    auto made = TlsServer::create(
        {certificate(name), certificate("test-key"), mutual ? certificate("authority") : ""});
    REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().text));
    return *made;
}

// Trusts `ca`; shows `cert` if that is not empty.
inline std::shared_ptr<const TlsClient> tls_client(const std::string& ca = "authority",
                                                   const std::string& name = "",
                                                   const std::string& cert = "") {
    TlsFiles files;
    files.ca = certificate(ca);
    if (!cert.empty()) {
        files.cert = certificate(cert);
        files.key = certificate("test-key");
    }
    auto made = TlsClient::create(files, name);
    REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().text));
    return *made;
}

}  // namespace moonpool::testing
