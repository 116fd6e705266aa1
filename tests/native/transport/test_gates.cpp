// What a peer of this host holds while it is inside of a gate, as one that was stopped amid a copy does; and
// one that asks without reading.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>

#include "bed.hpp"
#include "transport/frames.hpp"
#include "transport/host/client.hpp"
#include "transport/host/server.hpp"
#include "transport/host/unix_frame.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::host::Pass;

namespace {

constexpr int kShortMs = 200;

// An initiator that this test is, over the Unix socket of an engine.
struct Visitor {
    std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create({}));
    transport::PeerInfo peer;
    transport::Identity self;
    std::unique_ptr<transport::host::Client> client;

    // version: that it takes the engine for.
    explicit Visitor(Engine& engine, uint16_t version = transport::kEngineVersion) {
        REQUIRE(loop->start().ok());
        DialOptions options;
        options.address = engine.addresses().front();
        options.token = "secret";
        options.service = kServiceEngine;
        options.timeout_ms = 10000;
        Result<Dialed> dialed = dial(options);
        REQUIRE(dialed.ok());
        peer = *transport::decode_welcome(dialed->welcome);
        CHECK(peer.version == transport::kEngineVersion);
        peer.version = version;
        self.segment[0] = 9;
        self.boot_id = transport::read_boot_id();
        client = std::make_unique<transport::host::Client>(*loop);
    }
    ~Visitor() {
        client.reset();
        loop->stop();
    }
    Status open() {
        using transport::host::Patience;
        return client->turn(Patience::until(10000))->open(peer.shm, peer, self);
    }
    uint64_t generation() { return client->gate()->page().generation.load(); }
};

EngineOptions short_options(const std::string& name) {
    EngineOptions options = engine_options(name, "");
    options.timeout_ms = kShortMs;
    return options;
}

void check_timeout(const Status& status) {
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == Code::kTimeout);
    CHECK(status.error().text.find("must not be freed") != std::string::npos);
}

}  // namespace

TEST_CASE(
    "gates: a peer that stands still inside costs close() one deadline, and a further call ends with it") {
    constexpr int kRegions = 200;
    auto engine = make_engine(short_options("there"));
    std::vector<std::shared_ptr<transport::Memory>> memory;
    for (int i = 0; i < kRegions; ++i) memory.push_back(*engine->allocate(4096, ""));
    Visitor visitor(*engine);
    REQUIRE(visitor.open().ok());
    Pass inside(*visitor.client->gate(), visitor.generation());
    REQUIRE(inside.open());
    // One region, twice: it is told truthfully each time.
    auto first = reinterpret_cast<uint64_t>(memory[0]->data());
    check_timeout(engine->deregister_region(first));
    check_timeout(engine->deregister_region(first));
    auto start = std::chrono::steady_clock::now();
    check_timeout(engine->close());
    double spent_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    MESSAGE("close() of " << kRegions << " regions took " << spent_s << " s");
    CHECK(spent_s < 0.5 * kRegions * kShortMs / 1000);  // one deadline, not one for each
    check_timeout(engine->close());
    CHECK(engine->allocate(4096, "").error().code == Code::kClosed);
    inside.leave();
    CHECK(engine->close().ok());
    CHECK(engine->close().ok());
}

TEST_CASE("gates: a region whose close timed out is free when the peer has left, or ended") {
    auto engine = make_engine(short_options("there"));
    auto memory = *engine->allocate(4096, ""), other = *engine->allocate(4096, "");
    auto visitor = std::make_unique<Visitor>(*engine);
    REQUIRE(visitor->open().ok());
    auto gate = visitor->client->gate();  // a pass writes to it
    auto inside = std::make_unique<Pass>(*gate, visitor->generation());
    REQUIRE(inside->open());
    auto address = reinterpret_cast<uint64_t>(memory->data());
    check_timeout(engine->deregister_region(address));
    // No new visitor finds it, and others are not concerned.
    CHECK(metric(*engine, "regions") == 1);
    inside->leave();
    CHECK(engine->deregister_region(address).ok());
    CHECK(engine->deregister_region(address).error().code == Code::kInvalidArgument);
    // A peer that ends inside is inside of nothing.
    inside = std::make_unique<Pass>(*gate, visitor->generation());
    REQUIRE(inside->open());
    address = reinterpret_cast<uint64_t>(other->data());
    check_timeout(engine->deregister_region(address));
    visitor.reset();
    while (!engine->deregister_region(address).ok()) {
    }
    CHECK(engine->check_integrity());
}

TEST_CASE("gates: an engine is shut out once it has left, and one that does not say its name with each") {
    auto engine = make_engine(short_options("there"));
    Visitor visitor(*engine), old(*engine, transport::kVersionWithInitiator - 1), third(*engine);
    third.self.segment[0] = 10;
    REQUIRE(visitor.open().ok());
    REQUIRE(old.open().ok());
    REQUIRE(third.open().ok());
    Pass inside(*visitor.client->gate(), visitor.generation());
    REQUIRE(inside.open());
    Status out = engine->shut_out(visitor.self.segment);
    REQUIRE_FALSE(out.ok());
    CHECK(out.error().code == Code::kTimeout);
    CHECK_FALSE(Pass(*visitor.client->gate(), visitor.generation()).open());  // no other thread of it
    inside.leave();
    CHECK(engine->shut_out(visitor.self.segment).ok());
    CHECK_FALSE(old.client->alive());
    CHECK(third.client->alive());
    // Nor by a new session.
    Visitor again(*engine), older(*engine, transport::kVersionWithInitiator - 1), fourth(*engine);
    CHECK(again.open().error().code == Code::kAuth);
    CHECK(older.open().error().code == Code::kAuth);
    fourth.self.segment[0] = 10;
    CHECK(fourth.open().ok());
    REQUIRE(engine->admit(visitor.self.segment).ok());
    Visitor admitted(*engine);
    CHECK(admitted.open().ok());
}

TEST_CASE("gates: a peer that asks and does not read is answered when it does, and holds up no I/O thread") {
    constexpr size_t kRegions = 4000, kQuestions = 60;
    EngineOptions options = engine_options("there", "");
    options.io_threads = 1;
    auto engine = make_engine(options);
    std::vector<std::byte> memory(kRegions * 64);
    for (size_t i = 0; i < kRegions; ++i) {
        REQUIRE(engine->register_region(reinterpret_cast<uint64_t>(&memory[i * 64]), 32, "").ok());
    }
    Visitor visitor(*engine);
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    socklen_t size = transport::host::abstract_address(visitor.peer.shm.socket, address);
    REQUIRE(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    std::vector<std::byte> all;
    auto ask = [&](Kind kind, uint64_t id, const std::vector<std::byte>& body) {
        size_t at = begin_frame(all, kind, 0, id);
        all.insert(all.end(), body.begin(), body.end());
        finish_frame(all, at);
    };
    std::vector<std::byte> body;
    Writer w(body);
    w.bytes(visitor.peer.shm.cookie.data(), visitor.peer.shm.cookie.size());
    w.text16(visitor.peer.host_id);
    w.text16(visitor.peer.boot_id);
    ask(Kind::kShmOpen, 1, body);
    for (uint64_t i = 2; i < kQuestions + 2; ++i) {
        ask(Kind::kEngineRegions, i, transport::regions_question(visitor.peer, 0));
    }
    REQUIRE(transport::host::send_frame(fd.get(), all).ok());
    // What does not fit its socket waits; other peers are served by the same thread meanwhile.
    auto here = make_engine(engine_options("here", "tcp"));
    uint32_t segment = *here->open(engine->addresses().front());
    for (int i = 0; i < 20; ++i) REQUIRE(here->notify(segment, "between").ok());
    CHECK(engine->notifications()->size() == 20);
    transport::host::UnixFrameReader answers(4u << 20);
    for (uint64_t id = 1; id < kQuestions + 2; ++id) {
        for (;;) {
            Result<bool> whole = answers.read(fd.get());
            REQUIRE(whole.ok());
            if (*whole) break;
            pollfd readable{fd.get(), POLLIN, 0};
            REQUIRE(::poll(&readable, 1, 30000) == 1);
        }
        REQUIRE(answers.header().request_id == id);
        CHECK(answers.passed().valid() == (id == 1));
        if (id == 1) continue;
        Reader r(answers.body());
        (void)r.number<uint64_t>();
        std::optional<transport::ChangedRows> rows = transport::decode_changes(r);
        REQUIRE(rows.has_value());
        REQUIRE(rows->added.size() == kRegions);
    }
}
