// CUDA IPC between two processes, each with a software device of its own: what every transport passes is in
// test_conformance.cpp.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>

#include "../process.hpp"
#include "bed.hpp"
#include "transport/frames.hpp"
#include "transport/host/server.hpp"
#include "transport/host/unix_frame.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kIpcMiB = 1u << 20;
constexpr size_t kTheirs = 3 * kIpcMiB + 777;

uint64_t ipc_digest(const std::byte* data, size_t size) {
    uint64_t digest = 14695981039346656037u;
    for (size_t i = 0; i < size; ++i) digest = (digest ^ static_cast<uint64_t>(data[i])) * 1099511628211u;
    return digest;
}

EngineOptions ipc_options(const std::string& name, const std::string& transport, int timeout_ms = 10000) {
    EngineOptions options = engine_options(name, transport);
    options.timeout_ms = timeout_ms;
    return options;
}

// The other process, with an engine "there" that has kTheirs bytes of a card registered, twice in one
// allocation.
struct Owner : Child {
    explicit Owner(int first_card = 0) : Child("cuda ipc owner") {
        say(std::to_string(first_card));
        address = hear();
        first = std::stoull(hear());
        second = std::stoull(hear());
    }
    std::string ask(const std::string& line) {
        say(line);
        return hear();
    }
    std::string address;
    uint64_t first = 0, second = 0;
};

struct Here {
    explicit Here(const Owner& owner, const std::string& transport = "cuda_ipc", int timeout_ms = 10000)
        : engine(make_engine(ipc_options("here", transport, timeout_ms))) {
        Result<uint32_t> opened = engine->open(owner.address);
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment = *opened;
    }
    TransferRequest request(const std::vector<Slice>& slices) const {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        return request;
    }
    Result<uint64_t> transfer(const std::vector<Slice>& slices) { return engine->transfer(request(slices)); }
    std::shared_ptr<Engine> engine;
    uint32_t segment = 0;
};

// What the engine tells each peer of its tenant.
transport::PeerInfo offer_of(Engine& engine, const std::string& tenant) {
    DialOptions dialing;
    dialing.address = engine.addresses().front();
    dialing.token = "secret";
    dialing.tenant = tenant;
    dialing.service = kServiceEngine;
    Result<Dialed> dialed = dial(dialing);
    REQUIRE(dialed.ok());
    return *transport::decode_welcome(dialed->welcome);
}

// Those of the abstract namespace: one listens, and each session has one.
int sockets_named(const std::string& name) {
    std::ifstream list("/proc/net/unix");
    int found = 0;
    for (std::string line; std::getline(list, line);) found += line.ends_with("@" + name);
    return found;
}

// Until the copy that hangs is queued.
void wait_for_copy(int before) {
    while (soft_device().soft_calls("cuMemcpyAsync") == before) std::this_thread::yield();
}

}  // namespace

TEST_CASE("cuda ipc owner" * doctest::skip()) {
    Parent parent;
    Bed bed(Policy::kShuffled, 5);
    soft_device().soft_set_first_card(std::stoi(parent.hear()));
    {
        std::shared_ptr<Engine> engine = make_engine(ipc_options("there", ""));
        auto card = std::make_unique<device::DeviceMemory>(
            device::must(device::DeviceMemory::allocate(bed.device, 2 * kTheirs)));
        auto* bytes = reinterpret_cast<std::byte*>(soft_device().soft_at(card->address(), 2 * kTheirs));
        std::memset(bytes, 0x5A, 2 * kTheirs);
        for (uint64_t at : {uint64_t{0}, uint64_t{kTheirs}}) {
            REQUIRE(engine->register_region(card->address() + at, kTheirs, "cuda:0").ok());
        }
        parent.say(engine->addresses().front());
        parent.say(std::to_string(card->address()));
        parent.say(std::to_string(card->address() + kTheirs));
        for (std::string line = parent.hear(); !line.empty() && line != "end"; line = parent.hear()) {
            if (line == "digest") {
                parent.say(std::to_string(ipc_digest(bytes, kTheirs)));
            } else if (line == "free") {
                for (uint64_t at : {uint64_t{0}, uint64_t{kTheirs}}) {
                    REQUIRE(engine->deregister_region(card->address() + at).ok());
                }
                card.reset();
                parent.say("freed");
            } else if (line == "again") {
                card = std::make_unique<device::DeviceMemory>(
                    device::must(device::DeviceMemory::allocate(bed.device, 2 * kTheirs)));
                std::memset(soft_device().soft_at(card->address(), kTheirs), 0x66, kTheirs);
                REQUIRE(engine->register_region(card->address(), kTheirs, "cuda:0").ok());
                parent.say(std::to_string(card->address()));
            }
        }
        (void)engine->close();
    }
    bed.end();
    parent.say("ended");
}

// Begins to write to the memory of its parent, whose address it is told, and never ends.
TEST_CASE("cuda ipc writer" * doctest::skip()) {
    Parent parent;
    Bed bed;
    std::shared_ptr<Engine> engine = make_engine(ipc_options("writer", "cuda_ipc"));
    uint32_t segment = *engine->open(parent.hear());
    uint64_t remote = std::stoull(parent.hear());
    Memory mine(*engine, 4096, MemoryKind::kDevice);
    soft_device().soft_hang(1);
    std::vector<Slice> slices = {{mine.address(), remote, 4096, Direction::kWrite}};
    TransferRequest request;
    request.segments = {&segment, 1};
    request.slices = slices;
    int before = soft_device().soft_calls("cuMemcpyAsync");
    REQUIRE(engine->submit(request).ok());
    wait_for_copy(before);
    parent.say("under way");
    (void)parent.hear();
}

TEST_CASE(
    "cuda ipc: reads and writes are right byte for byte, under every policy and for every local memory") {
    Owner owner;
    each_policy([&](Bed&) {
        for (MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kHost, MemoryKind::kHostArena}) {
            CAPTURE(kind_name(kind));
            Random random(2330 + static_cast<uint64_t>(kind));
            Here here(owner);
            Memory mine(*here.engine, 2 * kTheirs, kind);
            mine.fill(random);
            int opened = soft_device().soft_calls("cuIpcOpenMemHandle");
            std::vector<Slice> writes, reads;
            for (uint64_t at = 0; at < kTheirs;) {
                uint64_t n = std::min<uint64_t>(random.between(1, kIpcMiB), kTheirs - at);
                writes.push_back({mine.address() + at, owner.first + at, n, Direction::kWrite});
                reads.push_back({mine.address() + kTheirs + at, owner.first + at, n, Direction::kRead});
                at += n;
            }
            std::ranges::reverse(reads);
            std::vector<std::byte> sent(mine.data(), mine.data() + kTheirs);
            REQUIRE(*here.transfer(writes) == kTheirs);
            CHECK(owner.ask("digest") == std::to_string(ipc_digest(sent.data(), kTheirs)));
            REQUIRE(*here.transfer(reads) == kTheirs);
            CHECK(std::memcmp(mine.data() + kTheirs, sent.data(), kTheirs) == 0);
            // The second region of the allocation is reached by what is open.
            Result<uint64_t> second = here.transfer({{mine.address(), owner.second, 1000, Direction::kRead}});
            REQUIRE(*second == 1000);
            CHECK(mine.data()[999] == std::byte{0x5A});
            CHECK(soft_device().soft_calls("cuIpcOpenMemHandle") == opened + 1);
            CHECK(metric(*here.engine, "cuda_ipc_write_bytes_total") == kTheirs);
            CHECK(metric(*here.engine, "cuda_ipc_read_bytes_total") == kTheirs + 1000);
        }
    });
    CHECK(owner.ask("end") == "ended");
    CHECK(owner.reap());
}

TEST_CASE("cuda ipc: of all paths it is the one that is taken") {
    Bed bed;
    Owner owner;
    {
        Here here(owner, "");
        Memory mine(*here.engine, kIpcMiB, MemoryKind::kDevice);
        REQUIRE(*here.transfer({{mine.address(), owner.first, kIpcMiB, Direction::kRead}}) == kIpcMiB);
        CHECK(metric(*here.engine, "cuda_ipc_read_bytes_total") == kIpcMiB);
        CHECK(here.engine->segment(here.segment)->regions.front().transport == "cuda_ipc");
    }
    bed.end();
}

TEST_CASE("cuda ipc: a peer without memory of cards is not offered a job twice, and once it has some it is") {
    Bed bed;
    {
        EngineOptions options = engine_options("here", "");
        options.transports = std::vector<std::string>{"cuda_ipc", "tcp"};
        Pair pair(options, engine_options("there", ""));
        const std::string socket = offer_of(*pair.there, "default").cuda_ipc.socket;
        CHECK(sockets_named(socket) == 1);  // listens: no session has begun
        Memory mine(*pair.here, 4096, MemoryKind::kHost);
        Memory theirs(*pair.there, 4096, MemoryKind::kHost);
        auto read = [&](Memory& from) {
            return pair.transfer({{mine.address(), from.address(), 4096, Direction::kRead}});
        };
        for (int i = 0; i < 5; ++i) REQUIRE(*read(theirs) == 4096);
        CHECK(sockets_named(socket) == 2);
        CHECK(metric(*pair.here, "retries_total") == 1);
        CHECK(metric(*pair.here, "tcp_read_bytes_total") == 5 * 4096);
        Memory card(*pair.there, 4096, MemoryKind::kDevice);
        REQUIRE(*read(card) == 4096);
        CHECK(metric(*pair.here, "cuda_ipc_read_bytes_total") == 4096);
    }
    bed.end();
}

TEST_CASE("cuda ipc: cards are found by what they are, not by their number; one that is not seen is said") {
    Bed bed;
    Owner owner(1);
    {
        Here here(owner);
        Memory mine(*here.engine, kIpcMiB, MemoryKind::kDevice);
        Result<uint64_t> moved = here.transfer({{mine.address(), owner.first, 4096, Direction::kRead}});
        REQUIRE_FALSE(moved.ok());
        CHECK_MESSAGE(moved.error().text.find("does not see that CUDA device") != std::string::npos,
                      moved.error().text);
        CHECK(soft_device().soft_calls("cuIpcOpenMemHandle") == 0);
        Here any(owner, "");
        Memory other(*any.engine, kIpcMiB, MemoryKind::kDevice);
        REQUIRE(*any.transfer({{other.address(), owner.first, kIpcMiB, Direction::kRead}}) == kIpcMiB);
        CHECK(metric(*any.engine, "tcp_read_bytes_total") == kIpcMiB);
    }
    {
        soft_device().soft_set_cards(2);  // its first one is ours by the number 1
        Here here(owner);
        Memory mine(*here.engine, kIpcMiB, MemoryKind::kDevice);
        REQUIRE(*here.transfer({{mine.address(), owner.first, kIpcMiB, Direction::kRead}}) == kIpcMiB);
        CHECK(mine.data()[kIpcMiB - 1] == std::byte{0x5A});
    }
    bed.end();
    CHECK(owner.ask("end") == "ended");
    CHECK(owner.reap());
}

TEST_CASE("cuda ipc: an owner that was killed fails transfers, and this process goes on") {
    for (int outcome : {0, device::cu::kInvalidValue}) {
        for (bool during : {false, true}) {
            CAPTURE(outcome);
            CAPTURE(during);
            Bed bed;
            {
                Owner owner;
                Here here(owner);
                Memory mine(*here.engine, kIpcMiB, MemoryKind::kDevice);
                std::vector<Slice> slices = {{mine.address(), owner.first, kIpcMiB, Direction::kRead}};
                REQUIRE(here.transfer(slices).ok());
                soft_device().soft_owner_ended(outcome);
                if (during) {
                    soft_device().soft_hang(1);
                    int before = soft_device().soft_calls("cuMemcpyAsync");
                    uint64_t ticket = *here.engine->submit(here.request(slices));
                    wait_for_copy(before);
                    owner.kill();
                    soft_device().soft_owner_ended(0);  // its bytes can be read: and are not to be trusted
                    soft_device().soft_unhang();
                    REQUIRE(*here.engine->wait(ticket, 10000));
                    TicketStatus status = *here.engine->status(ticket);
                    CHECK(status.state == TicketState::kFailed);
                    CHECK_MESSAGE(status.failure.error.text.find("gone") != std::string::npos,
                                  status.failure.error.text);
                } else {
                    owner.kill();
                }
                Result<uint64_t> moved = here.transfer(slices);
                REQUIRE_FALSE(moved.ok());
                CHECK_MESSAGE(moved.error().code == Code::kUnavailable, moved.error().text);
                Owner next;  // what this process has is as good as before
                Result<uint32_t> segment = here.engine->open(next.address);
                here.segment = *segment;
                REQUIRE(here.transfer({{mine.address(), next.first, kIpcMiB, Direction::kRead}}).ok());
                CHECK(mine.data()[5] == std::byte{0x5A});
            }
            bed.end();
        }
    }
}

TEST_CASE("cuda ipc: the owner's memory stays while a copy of another process may reach it") {
    // Of the transfer that copies: it waits, it has given up, or its segment was closed, too.
    enum class Caller { kWaits, kGaveUp, kClosed };
    for (Caller caller : {Caller::kWaits, Caller::kGaveUp, Caller::kClosed}) {
        const bool given_up = caller != Caller::kWaits;
        CAPTURE(static_cast<int>(caller));
        Bed bed;
        {
            Owner owner;
            Here here(owner, "cuda_ipc", given_up ? 300 : 10000);
            Memory mine(*here.engine, kIpcMiB, MemoryKind::kDevice);
            std::vector<Slice> slices = {{mine.address(), owner.first, kIpcMiB, Direction::kWrite}};
            REQUIRE(here.transfer(slices).ok());
            soft_device().soft_hang(1);
            int before = soft_device().soft_calls("cuMemcpyAsync");
            uint64_t ticket = *here.engine->submit(here.request(slices));
            wait_for_copy(before);
            if (given_up) {
                REQUIRE(*here.engine->wait(ticket, 10000));
                CHECK(here.engine->status(ticket)->failure.error.code == Code::kTimeout);
            }
            if (caller == Caller::kClosed) {
                REQUIRE(here.engine->release(ticket).ok());
                REQUIRE(here.engine->close_segment(here.segment).ok());
            }
            owner.say("free");
            CHECK_FALSE(readable(owner.fd(), 200));
            // The new list of regions does not have the memory; the copy has it open.
            if (caller == Caller::kGaveUp) REQUIRE_FALSE(here.transfer(slices).ok());
            CHECK(soft_device().soft_calls("cuIpcCloseMemHandle") == 0);
            soft_device().soft_unhang();
            CHECK(owner.hear() == "freed");
            if (!given_up) {
                REQUIRE(*here.engine->wait(ticket, 10000));
                CHECK(here.engine->status(ticket)->state == TicketState::kDone);
            }
            if (caller == Caller::kClosed) here.segment = *here.engine->open(owner.address);
            REQUIRE_FALSE(here.transfer(slices).ok());
            // Other memory, perhaps at the same address.
            uint64_t address = std::stoull(owner.ask("again"));
            REQUIRE(here.transfer({{mine.address(), address, kTheirs / 4, Direction::kRead}}).ok());
            CHECK(mine.data()[77] == std::byte{0x66});
            CHECK(owner.ask("end") == "ended");
            CHECK(owner.reap());
        }
        bed.end();
    }
}

TEST_CASE("cuda ipc: host memory is deregistered while a card that hangs copies other memory") {
    Bed bed;
    {
        EngineOptions mine = ipc_options("here", "cuda_ipc"), theirs = ipc_options("there", "");
        Pair pair(mine, theirs);
        Memory from(*pair.here, 4096, MemoryKind::kDevice), to(*pair.there, 4096, MemoryKind::kDevice);
        std::vector<std::byte> host(4096);
        const auto address = reinterpret_cast<uint64_t>(host.data());
        REQUIRE(pair.there->register_region(address, host.size(), "cpu:0").ok());
        std::vector<Slice> slices = {{from.address(), to.address(), 4096, Direction::kWrite}};
        soft_device().soft_hang(1);
        int before = soft_device().soft_calls("cuMemcpyAsync");
        uint64_t ticket = *pair.here->submit(pair.request(slices));
        wait_for_copy(before);
        CHECK(pair.there->deregister_region(address).ok());
        soft_device().soft_unhang();
        REQUIRE(*pair.here->wait(ticket, 10000));
        CHECK(pair.here->release(ticket).ok());
    }
    bed.end();
}

TEST_CASE("cuda ipc: an initiator that was killed amid a copy is inside of nothing") {
    Bed bed;
    {
        std::shared_ptr<Engine> engine = make_engine(ipc_options("there", "", 300));
        Memory mine(*engine, kIpcMiB, MemoryKind::kDevice);
        Child writer("cuda ipc writer");
        writer.say(engine->addresses().front());
        writer.say(std::to_string(mine.address()));
        REQUIRE(writer.hear() == "under way");
        Status status = engine->deregister_region(mine.address());
        REQUIRE_FALSE(status.ok());
        CHECK(status.error().code == Code::kTimeout);
        writer.kill();
        REQUIRE(engine->deregister_region(mine.address()).ok());
    }
    bed.end();
}

// The names of sockets are no secret: /proc/net/unix lists them.
TEST_CASE("cuda ipc: the socket of one tenant's engine tells another tenant nothing") {
    Bed bed;
    {
        EngineOptions of_another = ipc_options("other", "");
        of_another.tenant = "other";
        std::shared_ptr<Engine> there = make_engine(ipc_options("there", "")),
                                other = make_engine(of_another);
        Memory theirs(*there, 4096, MemoryKind::kDevice);
        transport::PeerInfo info = offer_of(*there, "default");
        transport::HostOffer own = offer_of(*other, "other").cuda_ipc;
        // -> the answers to a cookie and to a question for the memory, null: the socket was closed.
        auto ask = [&](const std::array<uint8_t, 32>* cookie) {
            Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            set_socket_timeouts(fd.get(), 10000);
            sockaddr_un address;
            socklen_t size = transport::host::abstract_address(info.cuda_ipc.socket, address);
            REQUIRE(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
            std::vector<std::optional<Kind>> kinds;
            transport::host::UnixFrameReader answers(65536);
            auto say = [&](Kind kind, const std::vector<std::byte>& body) {
                std::vector<std::byte> frame;
                begin_frame(frame, kind, 0, 1);
                frame.insert(frame.end(), body.begin(), body.end());
                finish_frame(frame, 0);
                bool answered = transport::host::send_frame(fd.get(), frame).ok();
                while (answered) {
                    Result<bool> whole = answers.read(fd.get());
                    answered = whole.ok();
                    if (!whole || *whole) break;
                    pollfd readable{fd.get(), POLLIN, 0};
                    REQUIRE(::poll(&readable, 1, 10000) == 1);
                }
                kinds.push_back(answered ? std::optional(answers.header().kind) : std::nullopt);
            };
            if (cookie != nullptr) {
                std::vector<std::byte> body;
                Writer w(body);
                w.bytes(cookie->data(), cookie->size());
                w.text16(info.host_id);
                w.text16(info.boot_id);
                say(Kind::kShmOpen, body);
            }
            say(Kind::kCudaRegions, {});
            return kinds;
        };
        using Kinds = std::vector<std::optional<Kind>>;
        CHECK(ask(&info.cuda_ipc.cookie) == Kinds{Kind::kShmOpen, Kind::kCudaRegions});
        CHECK(ask(&own.cookie) == Kinds{Kind::kError, std::nullopt});
        CHECK(ask(nullptr) == Kinds{std::nullopt});
    }
    bed.end();
}

TEST_CASE("cuda ipc: memory that the driver does not share goes another way, with the reason") {
    Bed bed;
    soft_device().soft_fail("cuIpcGetMemHandle", 1, device::cu::kInvalidValue);
    {
        Pair pair("cuda_ipc");
        Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kDevice);
        Result<uint64_t> moved = pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kRead}});
        REQUIRE_FALSE(moved.ok());
        CHECK_MESSAGE(moved.error().text.find("does not share this memory") != std::string::npos,
                      moved.error().text);
    }
    bed.end();
}
