// What concerns engines rather than transports: who may speak to whom, paths, several peers, limits.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "bed.hpp"
#include "transport/loopback/target.hpp"

using namespace moonpool;
using namespace moonpool::testing;

TEST_CASE("engine: another tenant and another token are refused") {
    auto there = make_engine(engine_options("there", ""));
    EngineOptions other = engine_options("other", "");
    other.tenant = "other";
    Result<uint32_t> opened = make_engine(other)->open(there->addresses().front());
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().code == Code::kAuth);
    CHECK(opened.error().text.find("tenant \"other\"") != std::string::npos);
    EngineOptions stranger = engine_options("stranger", "");
    stranger.token = "guessed";
    opened = make_engine(stranger)->open(there->addresses().front());
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().code == Code::kAuth);
}

TEST_CASE("engine: nobody at the address, and what is no engine") {
    auto here = make_engine(engine_options("here", ""));
    Result<uint32_t> opened = here->open("127.0.0.1:1");
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().code == Code::kUnavailable);
    CHECK_FALSE(here->open("no address").ok());
}

TEST_CASE("engine: each transport says in one sentence why it is unavailable") {
    EngineOptions options = engine_options("here", "tcp");
    auto here = make_engine(options);
    for (auto& [name, why] : here->transports()) CHECK(why.empty() == (name == "tcp"));
    auto there = make_engine(engine_options("there", ""));
    EngineOptions far = engine_options("far", "shm");
    far.host_id = "another";
    Result<uint32_t> opened = make_engine(far)->open(there->addresses().front());
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().text.find("shm: the peer is on another host (host_id") != std::string::npos);
    CHECK(opened.error().text.find("tcp: it is not among the transports") != std::string::npos);
    options.transports = std::vector<std::string>{"pigeon"};
    CHECK_FALSE(Engine::create(options).ok());
}

TEST_CASE("engine: the cheapest path is taken, and segment() tells which") {
    Pair pair(engine_options("here", ""), engine_options("there", ""));
    Memory own(*pair.there, 4096, MemoryKind::kHostArena), foreign(*pair.there, 100, MemoryKind::kHost);
    SegmentInfo info = *pair.here->segment(pair.segment);
    CHECK(info.name == "there");
    CHECK(info.id == pair.there->segment_id());
    CHECK(info.address == pair.there->addresses().front());
    REQUIRE(info.regions.size() == 2);
    for (const SegmentRegion& region : info.regions) {
        CHECK(region.transport == "loopback");
        CHECK(region.location == "cpu:0");
        CHECK(region.length == (region.kind == MemoryKind::kHostArena ? 4096 : 100));
    }
    EngineOptions far = engine_options("far", "");
    far.host_id = "another";
    far.transports = std::vector<std::string>{"shm", "tcp"};
    Pair apart(far, engine_options("there", ""));
    Memory memory(*apart.there, 4096, MemoryKind::kHostArena);
    CHECK(apart.here->segment(apart.segment)->regions[0].transport == "tcp");
}

TEST_CASE("engine: one batch to several peers, each slice with its own state") {
    auto here = make_engine(engine_options("here", ""));
    std::vector<std::shared_ptr<Engine>> peers;
    std::vector<uint32_t> numbers;
    for (const char* transport : {"loopback", "shm", "tcp"}) {
        EngineOptions options = engine_options(std::string("peer by ") + transport, "");
        peers.push_back(make_engine(options));
    }
    for (auto& peer : peers) numbers.push_back(*here->open(peer->addresses().front()));
    constexpr size_t kSlices = 300, kSize = 2000;
    Random random(320);
    Memory mine(*here, kSlices * kSize, MemoryKind::kHost);
    mine.fill(random);
    std::vector<std::unique_ptr<Memory>> theirs;
    for (auto& peer : peers)
        theirs.push_back(std::make_unique<Memory>(*peer, kSlices * kSize, MemoryKind::kHostArena));
    for (bool waits : {true, false}) {
        std::vector<Slice> slices;
        std::vector<uint32_t> segments;
        for (size_t i = 0; i < kSlices; ++i) {
            uint64_t wrong = !waits && i == 100 ? kSlices * kSize : 0;
            slices.push_back({mine.address() + i * kSize, theirs[i % 3]->address() + i * kSize + wrong, kSize,
                              Direction::kWrite});
            segments.push_back(numbers[i % 3]);
        }
        TransferRequest request;
        request.segments = segments;
        request.slices = slices;
        request.notify = "whole";
        if (waits) {
            REQUIRE(*here->transfer(request) == kSlices * kSize);
            for (size_t i = 0; i < kSlices; ++i) {
                REQUIRE(std::memcmp(theirs[i % 3]->data() + i * kSize, mine.data() + i * kSize, kSize) == 0);
            }
            for (auto& peer : peers) CHECK(peer->notifications()->size() == 1);
        } else {
            uint64_t ticket = *here->submit(request);
            REQUIRE(*here->wait(ticket, 10000));
            TicketStatus status = *here->status(ticket);
            CHECK(status.state == TicketState::kFailed);
            for (size_t i = 0; i < kSlices; ++i) {
                CHECK(status.slices[i] == (i == 100 ? SliceState::kFailed : SliceState::kDone));
            }
            for (auto& peer : peers) CHECK(peer->notifications()->empty());
        }
    }
    uint32_t unknown = 999;
    TransferRequest request;
    request.segments = {&unknown, 1};
    CHECK(here->transfer(request).error().code == Code::kInvalidArgument);
}

TEST_CASE("engine: an engine may speak to itself, also over ranges that meet") {
    auto here = make_engine(engine_options("here", ""));
    uint32_t self = *here->open(here->addresses().front());
    Random random(321);
    Memory memory(*here, 10000, MemoryKind::kHostArena);
    memory.fill(random);
    std::vector<std::byte> before = memory.bytes();
    std::vector<Slice> slices = {{memory.address(), memory.address() + 100, 5000, Direction::kWrite}};
    TransferRequest request;
    request.segments = {&self, 1};
    request.slices = slices;
    REQUIRE(here->transfer(request).ok());
    CHECK(std::memcmp(memory.data() + 100, before.data(), 5000) == 0);
}

TEST_CASE("engine: regions neither overlap nor come from nowhere") {
    auto here = make_engine(engine_options("here", ""));
    std::vector<std::byte> bytes(10000);
    auto at = reinterpret_cast<uint64_t>(bytes.data());
    REQUIRE(here->register_region(at + 100, 100, "cpu:0").ok());
    for (auto [from, length] : {std::pair<uint64_t, uint64_t>{at, 101},
                                {at + 199, 1},
                                {at + 100, 100},
                                {at, 10000},
                                {at + 150, 10},
                                {at, 0},
                                {0, 10},
                                {UINT64_MAX - 5, 10}}) {
        CHECK(here->register_region(from, length, "").error().code == Code::kInvalidArgument);
    }
    CHECK(here->register_region(at, 100, "").ok());
    CHECK(here->register_region(at + 200, 1, "").ok());
    CHECK(here->register_region(0x1000, 4096, "").error().text.find("nothing is mapped") !=
          std::string::npos);
    CHECK(here->deregister_region(at + 101).error().code == Code::kInvalidArgument);
    CHECK(here->deregister_region(at + 100).ok());
    CHECK(here->register_region(at + 100, 100, "").ok());
    CHECK(here->check_integrity());
}

TEST_CASE("engine: text that peers could not read is refused where it is given") {
    const std::string bad = "\xff\xfe";
    for (std::string EngineOptions::*field :
         {&EngineOptions::name, &EngineOptions::host_id, &EngineOptions::tenant}) {
        EngineOptions options = engine_options("here", "");
        options.*field = bad;
        Result<std::shared_ptr<Engine>> made = Engine::create(options);
        REQUIRE_FALSE(made.ok());
        CHECK(made.error().code == Code::kInvalidArgument);
        CHECK(made.error().text.find("must be UTF-8") != std::string::npos);
        options.*field = "\u00fc";
        CHECK(Engine::create(options).ok());
    }
    auto here = make_engine(engine_options("here", ""));
    CHECK(here->allocate(4096, bad).error().code == Code::kInvalidArgument);
    std::vector<std::byte> bytes(4096);
    CHECK(here->register_region(reinterpret_cast<uint64_t>(bytes.data()), 4096, bad).error().code ==
          Code::kInvalidArgument);
    CHECK(metric(*here, "regions") == 0);
    // What is cut at a NUL would be another address.
    std::string address = here->addresses().front();
    std::string cut = address.substr(0, address.find(':')) + std::string("\0.example", 9) +
                      address.substr(address.find(':'));
    CHECK(here->open(cut).error().code == Code::kInvalidArgument);
}

TEST_CASE("engine: a timeout is above 0") {
    for (int timeout_ms : {0, -5}) {
        EngineOptions options = engine_options("here", "");
        options.timeout_ms = timeout_ms;
        CHECK(Engine::create(options).error().code == Code::kInvalidArgument);
    }
}

TEST_CASE("engine: more memory than is left is refused before the kernel ends a process for it") {
    // A machine that has 600 MiB when it is asked first, and less each time: others take memory, too.
    constexpr uint64_t kMiB = 1u << 20;
    uint64_t left = 600 * kMiB;
    int asked = 0;
    auto ask = [&]() -> std::optional<AvailableMemory> {
        ++asked;
        return AvailableMemory{left, 16000 * kMiB, "the control group /pod"};
    };
    Result<std::shared_ptr<transport::Memory>> memory = transport::Memory::create(700 * kMiB, ask);
    REQUIRE_FALSE(memory.ok());
    CHECK(memory.error().code == Code::kTooLarge);
    CHECK(memory.error().text.find("the control group /pod leaves 629145600") != std::string::npos);
    CHECK(asked == 1);
    CHECK(transport::Memory::create(600 * kMiB, ask).error().code == Code::kTooLarge);
    REQUIRE(transport::Memory::create(8 * kMiB, ask).ok());
    // The second step finds less than the first.
    asked = 0;
    auto shrinking = [&]() -> std::optional<AvailableMemory> {
        return AvailableMemory{asked++ == 0 ? left : 10 * kMiB, 16000 * kMiB, "the machine"};
    };
    CHECK(transport::Memory::create(300 * kMiB, shrinking).error().code == Code::kTooLarge);
    CHECK(asked == 2);
    CHECK(transport::Memory::create(4096, [] { return std::nullopt; }).ok());  // nobody can tell
    // This machine: more than it has in all.
    auto here = make_engine(engine_options("here", ""));
    std::optional<AvailableMemory> machine = available_memory();
    REQUIRE(machine);
    Result<std::shared_ptr<transport::Memory>> all = here->allocate(machine->total_bytes + kMiB, "");
    REQUIRE_FALSE(all.ok());
    CHECK(all.error().code == Code::kTooLarge);
}

TEST_CASE("engine: a port shared with others") {
    ListenerOptions door;
    door.addresses = {"127.0.0.1:0"};
    door.token = "secret";
    Result<std::unique_ptr<Listener>> made = Listener::create(std::move(door));
    REQUIRE(made.ok());
    std::unique_ptr<Listener> listener = std::move(*made);
    EngineOptions options = engine_options("there", "");
    options.listen.clear();
    options.listener = listener.get();
    auto there = make_engine(options);
    REQUIRE(listener->start().ok());
    auto here = make_engine(engine_options("here", ""));
    CHECK(there->addresses() == listener->addresses());
    CHECK(here->open(listener->addresses().front()).ok());
    (void)there->close();
    Result<uint32_t> opened = here->open(listener->addresses().front());
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.error().text.find("closed") != std::string::npos);
}

TEST_CASE("engine: a full inbox refuses, and says so to the sender") {
    Pair pair("tcp");
    std::string large(1 << 20, 'x');
    size_t sent = 0;
    Status status = success();
    while (status && sent < 100) {
        status = pair.here->notify(pair.segment, large);
        if (status) ++sent;
    }
    CHECK(sent == 64);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == Code::kTooLarge);
    CHECK(pair.there->notifications()->size() == 64);
    CHECK(pair.here->notify(pair.segment, "again").ok());
    CHECK(pair.here->notify(pair.segment, large + "x").error().code == Code::kTooLarge);
}

TEST_CASE("engine: callers that go on asking do not keep it from closing") {
    for (int round = 0; round < 100; ++round) {
        auto engine = make_engine(engine_options("here", "loopback"));
        std::atomic<bool> stop{false};
        std::vector<std::jthread> callers;
        for (int i = 0; i < 4; ++i) {
            callers.emplace_back([&] {
                while (!stop) (void)engine->poll();
            });
        }
        Status closed = engine->close();
        stop = true;
        REQUIRE_MESSAGE(closed.ok(), (closed.ok() ? "" : closed.error().text));
    }
}

TEST_CASE("engine: IPv6") {
    EngineOptions options = engine_options("there", "");
    options.listen = {"[::1]:0"};
    Result<std::shared_ptr<Engine>> there = Engine::create(options);
    if (!there) return;  // a machine without IPv6
    auto here = make_engine(engine_options("here", "tcp"));
    CHECK((*there)->addresses().front().starts_with("[::1]:"));
    CHECK(here->open((*there)->addresses().front()).ok());
}

TEST_CASE("engine: memory of a NUMA node") {
    auto engine = make_engine(engine_options("here", ""));
    Result<std::shared_ptr<transport::Memory>> memory = engine->allocate(1 << 20, "node:0");
    REQUIRE_MESSAGE(memory.ok(), (memory.ok() ? "" : memory.error().text));
    int policy = 0;
    unsigned long nodes[16] = {};
    constexpr unsigned long kOfAddress = 2;  // MPOL_F_ADDR
    REQUIRE(::syscall(SYS_get_mempolicy, &policy, nodes, 1025, (*memory)->data(), kOfAddress) == 0);
    CHECK(policy == 2);  // MPOL_BIND
    CHECK(nodes[0] == 1);
    for (const char* wrong : {"node:", "node:x", "node:1x", "node:-1", "node:1023", "node:99999"}) {
        CAPTURE(wrong);
        Result<std::shared_ptr<transport::Memory>> none = engine->allocate(4096, wrong);
        REQUIRE_FALSE(none.ok());
        CHECK(none.error().code == Code::kInvalidArgument);
        CHECK(none.error().text.find("node") != std::string::npos);
    }
    CHECK(engine->allocate(4096, "nodes").ok());  // a label
    CHECK(engine->allocate(uint64_t{1} << 41, "node:0").error().code == Code::kTooLarge);
}
