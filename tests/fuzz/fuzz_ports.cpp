// libFuzzer: bytes from a peer, against a living node, master and transfer engine in this process. The engine
// has NICs of the software libibverbs.
//
// The first byte of an input chooses the process and how far the caller got: a port before the proof, or one
// of the services behind it; of the engine also a connection that has said HELLO, and its Unix socket behind
// SHM_OPEN. The rest is sent as it is, then the end; the input is over when the other side has closed.
// Whatever it was, all three keep serving and their books stay sound. Coverage counts the servers' threads
// too. One choice more is for what an engine reads of the answers of a peer: decoders alone, without a
// socket.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "directory/master_server.hpp"
#include "engine/engine.hpp"
#include "store/node/server.hpp"
#include "transport/cuda_ipc/target.hpp"
#include "transport/efa/messages.hpp"
#include "transport/frames.hpp"
#include "transport/host/server.hpp"
#include "transport/nic/messages.hpp"
#include "transport/rdma/messages.hpp"
#include "wire/address.hpp"
#include "wire/dial.hpp"

using namespace moonpool;

namespace {

constexpr const char* kToken = "a token";
constexpr uint64_t kSoundEvery = 256;  // inputs between two checks of the books
// Where the engine has its memory: where the examples of docs/wire_engine.md write.
constexpr uint64_t kRegion = 0x400000, kRegionBytes = 64u << 10;

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
    std::shared_ptr<Engine> engine;
    std::string node_address, master_address, engine_address;
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

        EngineOptions engine_options;
        engine_options.name = "fuzzed";
        engine_options.token = kToken;
        engine_options.listen = {"127.0.0.1:0"};
        engine_options.rdma.library = beside_program("libsoftverbs.so");
        engine_options.rdma.chunk_bytes = 16u << 10;
        engine = must(Engine::create(std::move(engine_options)));
        for (auto& [name, why] : engine->transports()) {
            if (name == "rdma" && !why.empty()) fail("no NICs in software: " + why);
        }
        engine_address = engine->addresses().at(0);
        void* memory = ::mmap(reinterpret_cast<void*>(kRegion), kRegionBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (memory == MAP_FAILED) fail("the engine's memory is not where the examples have it");
        if (!engine->register_region(kRegion, kRegionBytes, "")) fail("no region");
    }

    static std::string beside_program(const char* library) {
        char self[4096] = {};
        if (::readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) fail("no /proc");
        std::string path = self;
        return path.substr(0, path.rfind('/') + 1) + library;
    }
};

Dialed dialed(const std::string& address, std::string_view service) {
    DialOptions options;
    options.address = address;
    options.token = kToken;
    options.service = service;
    options.timeout_ms = 10000;
    return must(dial(options));
}
Fd proved(const std::string& address, std::string_view service) {
    return std::move(dialed(address, service).fd);
}

void send_all(int fd, const std::vector<std::byte>& frame) {
    if (::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(frame.size())) {
        fail("the engine does not take its first frame");
    }
}

// Of an engine, behind a HELLO that is in order.
Fd greeted(const std::string& address) {
    Dialed peer = dialed(address, kServiceEngine);
    std::optional<transport::PeerInfo> info = transport::decode_welcome(peer.welcome);
    if (!info) fail("the engine's WELCOME is unreadable");
    static uint32_t channel = 0;
    transport::Hello hello;
    hello.segment[0] = 1;
    hello.expected = info->segment;
    hello.channel = ++channel;
    hello.name = "fuzzer";
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kEngineHello, 0, 1);
    Writer w(frame);
    encode(w, hello);
    finish_frame(frame, at);
    send_all(peer.fd.get(), frame);
    return std::move(peer.fd);
}

// Its Unix socket, behind SHM_OPEN.
Fd beside(const std::string& address) {
    Dialed peer = dialed(address, kServiceEngine);
    std::optional<transport::PeerInfo> info = transport::decode_welcome(peer.welcome);
    if (!info) fail("the engine's WELCOME is unreadable");
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un name{};
    socklen_t size = transport::host::abstract_address(info->shm.socket, name);
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&name), size) != 0) fail("no Unix socket");
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kShmOpen, 0, 1);
    Writer w(frame);
    w.bytes(info->shm.cookie.data(), info->shm.cookie.size());
    w.text16(info->host_id);
    w.text16(info->boot_id);
    finish_frame(frame, at);
    send_all(fd.get(), frame);
    return fd;
}

// What an engine reads of a peer's answers. Whatever they say, no more is kept than has come.
void decode(uint8_t choice, std::span<const std::byte> body) {
    auto bounded = [&](size_t kept) {
        if (kept > body.size()) fail("a decoder keeps more than has come");
    };
    auto keys = [&](transport::nic::KeySize size) {
        auto rows = transport::nic::decode_keys(Reader(body), size);
        if (!rows) return;
        bounded(rows->size());
        for (const auto& row : *rows) bounded(row.keys.size());
    };
    auto offer_of_ports = [&](std::span<const std::byte> offer) {
        if (auto ports = transport::rdma::decode_offer(offer)) bounded(ports->size());
    };
    auto offer_of_nics = [&](std::span<const std::byte> offer) {
        if (auto read = transport::efa::decode_offer(offer)) bounded(read->nics.size());
    };
    switch (choice % 11) {
        case 0:
            if (auto info = transport::decode_welcome(body)) {
                for (const auto& [name, offer] : info->offers) {
                    offer_of_ports(offer);
                    offer_of_nics(offer);
                }
            }
            return;
        case 1:
            if (auto rows = transport::decode_regions(Reader(body))) bounded(rows->size());
            return;
        case 2:
            if (auto rows = transport::decode_changes(Reader(body))) bounded(rows->removed.size());
            return;
        case 3:
            return keys(transport::nic::KeySize::k32);
        case 4:
            return keys(transport::nic::KeySize::k64);
        case 5:
            return offer_of_ports(body);
        case 6: {
            Reader r(body);
            transport::rdma::Endpoint endpoint = transport::rdma::decode_endpoint(r);
            if (r.ok() && (endpoint.port.mtu > 5 || endpoint.psn > 0xffffff))
                fail("an endpoint out of range");
            return;
        }
        case 7:
            return offer_of_nics(body);
        case 8:
            if (auto endpoint = transport::efa::decode_endpoint(Reader(body)))
                bounded(endpoint->address.size());
            return;
        case 9:
            if (auto rows = transport::cuda_ipc::decode_rows(Reader(body))) bounded(rows->size());
            return;
        default:
            (void)transport::decode_hello(Reader(body));
            (void)transport::decode_regions_question(Reader(body));
    }
}

constexpr uint8_t kChoices = 11, kDecoders = 10;

Fd opened(Targets& targets, uint8_t choice) {
    switch (choice) {
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
        case 6:
            return proved(targets.engine_address, kServiceEngine);
        case 7:
            return greeted(targets.engine_address);
        case 8:
            return must(connect_tcp(targets.engine_address, 10000, ""));
        case 9:
            return beside(targets.engine_address);
        default:
            return must(connect_tcp(targets.master_address, 10000, ""));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Targets targets;
    if (size == 0) return 0;
    const uint8_t choice = data[0] % kChoices;
    if (choice == kDecoders) {
        if (size > 1) decode(data[1], std::as_bytes(std::span(data + 2, size - 2)));
        return 0;
    }
    Fd fd = opened(targets, choice);
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
        if (!targets.engine->check_integrity()) fail("the engine's books are not sound");
        (void)targets.engine->notifications();  // its inbox is bounded
    }
    return 0;
}
