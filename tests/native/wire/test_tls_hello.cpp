// What a ClientHello may claim, in whatever pieces it comes.
#include <doctest/doctest.h>

#include <string>

#include "wire/tls_hello.hpp"

using moonpool::TlsHello;

namespace {

std::string message(char type, size_t size) {
    return {type, static_cast<char>(size >> 16), static_cast<char>(size >> 8), static_cast<char>(size)};
}

bool fits(TlsHello& hello, const std::string& bytes, size_t piece) {
    for (size_t at = 0; at < bytes.size(); at += piece) {
        std::string part = bytes.substr(at, piece);
        if (!hello.fits(reinterpret_cast<const std::byte*>(part.data()), part.size())) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("tls hello: one of more than the limit is refused, in whatever pieces it comes") {
    for (size_t piece : {1, 3, 4, 5, 4096, 70000}) {
        CAPTURE(piece);
        TlsHello fitting, large, second;
        CHECK(fits(fitting, message(1, TlsHello::kBytesMax) + std::string(TlsHello::kBytesMax, 'x'), piece));
        CHECK(!fits(large, message(1, TlsHello::kBytesMax + 1), piece));
        CHECK(fits(second, message(1, 300) + std::string(300, '\xff'), piece));
        CHECK(!fits(second, message(1, 1 << 17), piece));
    }
}

TEST_CASE("tls hello: what follows is not looked at") {
    TlsHello certificate, encrypted;
    CHECK(fits(certificate, message(1, 2) + "ab" + message(11, 30000) + message(1, 1 << 17), 7));
    CHECK(fits(encrypted, message(1, 0) + message(1, 0) + message(1, 1 << 17), 7));
}
