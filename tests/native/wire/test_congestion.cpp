// Which connections are taken off BBR.
#include <doctest/doctest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "base/fd.hpp"
#include "wire/congestion.hpp"

using namespace moonpool;

namespace {

std::string congestion(int fd) {
    char name[16] = {};
    socklen_t size = sizeof(name) - 1;
    REQUIRE(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
    return name;
}

bool choose(int fd, const std::string& name) {
    return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) ==
           0;
}

struct Pair {
    Fd caller{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)}, server;

    Pair() {
        Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* any = reinterpret_cast<sockaddr*>(&address);
        REQUIRE(::bind(listener.get(), any, size) == 0);
        REQUIRE(::listen(listener.get(), 1) == 0);
        REQUIRE(::getsockname(listener.get(), any, &size) == 0);
        REQUIRE(::connect(caller.get(), any, size) == 0);
        server.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
        REQUIRE(server.valid());
    }
};

}  // namespace

TEST_CASE("congestion: BBR to a near peer becomes Reno, on both ends") {
    Pair pair;
    for (Fd* end : {&pair.caller, &pair.server}) {
        if (!choose(end->get(), "bbr")) {
            MESSAGE("not run: this kernel has no BBR, or not for us");
            return;
        }
        leave_bbr_when_near(end->get());
        CHECK(congestion(end->get()) == "reno");
    }
}

TEST_CASE("congestion: any other choice stays") {
    Pair pair;
    for (const char* name : {"reno", "cubic", "dctcp"}) {
        if (!choose(pair.caller.get(), name)) continue;
        leave_bbr_when_near(pair.caller.get());
        CHECK(congestion(pair.caller.get()) == name);
    }
}

TEST_CASE("congestion: before the first round trip nothing is known, and nothing is changed") {
    Fd alone(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!choose(alone.get(), "bbr")) {
        MESSAGE("not run: this kernel has no BBR, or not for us");
        return;
    }
    leave_bbr_when_near(alone.get());
    CHECK(congestion(alone.get()) == "bbr");
}
