// libFuzzer: bytes from a peer, against a living node and a living master in this process.
//
// The first byte of an input chooses who is spoken to and how far the caller got: a port before the proof, or
// one of the services behind it. The rest is sent as it is, then the end; the input is over when the other
// side has closed. Whatever it was, both keep serving and their books stay sound. Coverage counts the
// servers' threads too.
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "directory/master_server.hpp"
#include "store/node/server.hpp"
#include "wire/address.hpp"
#include "wire/dial.hpp"

using namespace moonpool;

namespace {

constexpr const char* kToken = "a token";
constexpr uint64_t kSoundEvery = 256;  // inputs between two checks of the books

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "fuzz_ports: %s\n", why.c_str());
    std::abort();
}

template <class T>
T must(Result<T> result) {
    if (!result) fail(result.error().text);
    return std::move(*result);
}

struct Targets {
    std::unique_ptr<Server> node;
    std::unique_ptr<MasterServer> master;
    std::string node_address, master_address;
    uint64_t inputs = 0;

    Targets() {
        ServerOptions options;
        options.token = kToken;
        PoolOptions pool;
        pool.arena_bytes = 4u << 20;
        pool.objects_max = 4096;
        options.pools = {pool};
        options.listen = {"127.0.0.1:0"};
        options.scrub_bytes_per_s = 0;  // checksums of the fuzzer are lies
        node = must(Server::create(std::move(options)));
        if (!node->start()) fail("the node does not start");
        node_address = node->addresses().at(0);

        MasterServerOptions master_options;
        master_options.token = kToken;
        master_options.addresses = {"127.0.0.1:0"};
        master = must(MasterServer::create(std::move(master_options)));
        if (!master->start()) fail("the master does not start");
        master_address = master->addresses().at(0);
    }
};

Fd proved(const std::string& address, std::string_view service) {
    DialOptions options;
    options.address = address;
    options.token = kToken;
    options.service = service;
    options.timeout_ms = 10000;
    return std::move(must(dial(options)).fd);
}

Fd opened(Targets& targets, uint8_t choice) {
    switch (choice % 6) {
        case 0:
            return proved(targets.node_address, kServiceStore);
        case 1:
            return proved(targets.master_address, kServiceMember);
        case 2:
            return proved(targets.master_address, kServiceDirectory);
        case 3:
            return proved(targets.master_address, kServiceStandby);
        case 4:
            return must(connect_tcp(targets.node_address, 10000, ""));
        default:
            return must(connect_tcp(targets.master_address, 10000, ""));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Targets targets;
    if (size == 0) return 0;
    Fd fd = opened(targets, data[0]);
    set_socket_timeouts(fd.get(), 15000);
    size_t sent = 1;
    while (sent < size) {
        ssize_t n = ::send(fd.get(), data + sent, size - sent, MSG_NOSIGNAL);
        if (n <= 0) break;  // it was ended in the middle, which is its right
        sent += static_cast<size_t>(n);
    }
    ::shutdown(fd.get(), SHUT_WR);
    char answer[4096];
    ssize_t n = 0;
    while ((n = ::recv(fd.get(), answer, sizeof(answer), 0)) > 0) {
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) fail("the connection was not ended");
    if (++targets.inputs % kSoundEvery == 0) {
        if (!targets.node->check_integrity()) fail("the node's books are not sound");
        if (!targets.master->check_integrity()) fail("the master's books are not sound");
    }
    return 0;
}
