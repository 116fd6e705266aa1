#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "../directory/server_bed.hpp"
#include "wire/accept_queue.hpp"
#include "wire/address.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

struct Bed {
    Fd listening;
    std::unique_ptr<AcceptQueue> queue;

    explicit Bed(size_t places) {
        Result<std::vector<SocketAddress>> any = resolve("127.0.0.1:0", true);
        REQUIRE(any);
        Result<Fd> socket = listen_tcp(any->front(), "127.0.0.1:0");
        REQUIRE(socket);
        listening = std::move(*socket);
        Result<std::unique_ptr<AcceptQueue>> made = AcceptQueue::create(Fd(::dup(listening.get())), places);
        REQUIRE(made);
        queue = std::move(*made);
        REQUIRE(queue->start());
    }

    // From that address of the loopback network.
    Fd call(const char* from) {
        SocketAddress to;
        to.size = sizeof(to.storage);
        REQUIRE(::getsockname(listening.get(), to.get(), &to.size) == 0);
        Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_in own{};
        own.sin_family = AF_INET;
        REQUIRE(::inet_pton(AF_INET, from, &own.sin_addr) == 1);
        REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0);
        REQUIRE(::connect(fd.get(), to.get(), to.size) == 0);
        return fd;
    }
    bool wakes() {
        pollfd p{queue->wake_fd(), POLLIN, 0};
        return ::poll(&p, 1, 0) == 1;
    }
    std::vector<Fd> wait_for(size_t n) {
        std::vector<Fd> all;
        CHECK(until([&] {
            for (Fd& fd : queue->take(n - all.size())) all.push_back(std::move(fd));
            return all.size() == n;
        }));
        return all;
    }
};

std::string caller(const Fd& fd) { return host_of(peer_address(fd.get())); }

TEST_CASE("accept queue: a flood of one address keeps no other address waiting, and costs bounded places") {
    Bed bed(8);
    std::vector<Fd> flood;
    for (int i = 0; i < 100; ++i) flood.push_back(bed.call("127.0.0.2"));
    Fd other = bed.call("127.0.0.3");
    REQUIRE(until([&] { return bed.queue->dropped_total() == 93; }));
    CHECK(bed.wakes());
    std::vector<Fd> taken = bed.queue->take(2);
    REQUIRE(taken.size() == 2);
    CHECK((caller(taken[0]) == "127.0.0.3" || caller(taken[1]) == "127.0.0.3"));
    CHECK(bed.queue->take(100).size() == 6);
    CHECK_FALSE(bed.wakes());
    CHECK(bed.queue->take(1).empty());
}

TEST_CASE("accept queue: connections come out as sockets that work, and it wakes again when more come") {
    Bed bed(4);
    for (int round = 0; round < 3; ++round) {
        Fd client = bed.call("127.0.0.2");
        REQUIRE(until([&] { return bed.wakes(); }));
        std::vector<Fd> taken = bed.wait_for(1);
        CHECK_FALSE(bed.wakes());
        CHECK(::send(client.get(), "x", 1, MSG_NOSIGNAL) == 1);
        char byte = 0;
        CHECK(until([&] { return ::recv(taken[0].get(), &byte, 1, MSG_DONTWAIT) == 1; }));
        CHECK(byte == 'x');
    }
}

TEST_CASE("accept queue: what waits is closed with it") {
    Bed bed(4);
    Fd client = bed.call("127.0.0.2");
    REQUIRE(until([&] { return bed.wakes(); }));
    bed.queue->stop();
    bed.queue->stop();
    char byte;
    CHECK(until([&] { return ::recv(client.get(), &byte, 1, MSG_DONTWAIT) == 0; }));
    CHECK(bed.queue->take(1).empty());
    CHECK_FALSE(AcceptQueue::create(Fd(::dup(bed.listening.get())), 0).ok());
}

TEST_CASE("accept queue: of IPv6 a /64 counts as one address") {
    auto network = [](const char* text) {
        Result<std::vector<SocketAddress>> found = resolve(text, false);
        REQUIRE(found);
        return network_of(found->front());
    };
    CHECK(network("[fd00::1]:1") == network("[fd00::ffff:2]:2"));
    CHECK(network("[fd00::1]:1") != network("[fd00:0:0:1::1]:1"));
    CHECK(network("[::ffff:10.0.0.1]:1") == network("10.0.0.1:2"));
    CHECK(network("10.0.0.1:1") != network("10.0.0.2:1"));
}

}  // namespace
