// Peers that send anything: random bytes, frames with bits flipped, half frames, too many of them. Whatever
// comes, only registered memory is written, the engine serves others on, and a caller gets an error.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <chrono>
#include <iostream>
#include <mutex>
#include <thread>

#include "../drip.hpp"
#include "bed.hpp"
#include "transport/efa/fabric.hpp"
#include "transport/efa/messages.hpp"
#include "transport/frames.hpp"
#include "transport/host/server.hpp"
#include "transport/nic/messages.hpp"
#include "transport/rdma/messages.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::TransferRow;
namespace nic = transport::nic;
namespace rdma = transport::rdma;
namespace efa = transport::efa;
using std::chrono::steady_clock;

namespace {

// NICs in software, of which a peer may ask.
struct Asked {
    VerbsBed nics{"devices=2"};
    std::optional<FabricBed> fabric;
    Asked() {
#if !defined(__SANITIZE_THREAD__)  // it does not see into libfabric
        if (efa::has_nic(tcp_fabric()).ok()) fabric.emplace();
#endif
    }
};

DialOptions to(Engine& engine) {
    DialOptions options;
    options.address = engine.addresses().front();
    options.token = "secret";
    options.service = kServiceEngine;
    options.timeout_ms = 10000;
    return options;
}

void frame(std::vector<std::byte>& out, Kind kind, const std::vector<std::byte>& body, uint64_t id = 1) {
    size_t at = begin_frame(out, kind, 0, id);
    out.insert(out.end(), body.begin(), body.end());
    finish_frame(out, at);
}

std::vector<std::byte> hello(Engine& target, uint32_t channel) {
    std::vector<std::byte> body, out;
    body.reserve(256);
    Writer w(body);
    transport::Hello h;
    h.segment[0] = 1;
    h.expected = target.segment_id();
    h.channel = channel;
    h.name = "hostile";
    encode(w, h);
    frame(out, Kind::kEngineHello, body);
    return out;
}

std::vector<std::byte> transfer(const std::vector<TransferRow>& rows) {
    std::vector<std::byte> body, out;
    body.reserve(65536);
    Writer w(body);
    w.number(static_cast<uint32_t>(rows.size()));
    w.number(uint32_t{0});
    uint64_t bytes = 0;
    for (const TransferRow& row : rows) {
        w.number(row);
        if (row.direction == 1) bytes += row.length;
    }
    body.resize(body.size() + bytes, std::byte{0x5A});
    frame(out, Kind::kEngineTransfer, body);
    return out;
}

// The bodies of the questions for transports, as an engine sends them; of those that are served and of
// others.
enum class Asking { kKeys, kConnect, kEnd };
std::vector<std::byte> question(Random& random, Asking asking, const std::string& transport,
                                const Memory& memory) {
    const auto pair = static_cast<uint32_t>(random.below(70));
    if (asking == Asking::kEnd) return nic::end_question(transport, pair);
    if (asking == Asking::kKeys) {
        std::vector<nic::Range> ranges(random.between(1, 5));
        for (nic::Range& range : ranges) {
            range.length = random.below(memory.size());
            range.address = memory.address() + random.below(memory.size() - range.length);
            if (random.one_in(4)) range.address = random.next();
        }
        return nic::keys_question(transport, ranges);
    }
    std::vector<std::byte> end;
    if (transport == efa::kName) {
        efa::PeerEndpoint endpoint{random.one_in(2), {}};
        endpoint.address.resize(random.one_in(2) ? 16 : random.between(1, 256));  // of IPv4, or of none
        for (std::byte& byte : endpoint.address) byte = std::byte(random.below(256));
        end = efa::encode_endpoint(endpoint);
    } else {
        Writer w(end);
        rdma::Endpoint endpoint;
        endpoint.port.infiniband = random.one_in(4);
        endpoint.port.mtu = static_cast<uint8_t>(random.between(1, 5));
        endpoint.port.lid = static_cast<uint16_t>(random.next());
        endpoint.port.gid[10] = endpoint.port.gid[11] = 0xff;
        endpoint.port.gid[12] = 10, endpoint.port.gid[13] = 8, endpoint.port.gid[15] = 1;
        endpoint.port.gid[14] = static_cast<uint8_t>(random.below(random.one_in(4) ? 256 : 2));
        endpoint.number = static_cast<uint32_t>(random.next());
        endpoint.psn = static_cast<uint32_t>(random.below(1u << 24));
        endpoint.reads = static_cast<uint8_t>(random.between(1, 255));
        rdma::encode(w, endpoint);
    }
    return nic::connect_question(transport, pair, static_cast<uint8_t>(random.below(3)), end);
}
std::vector<std::byte> any_question(Random& random, const Memory& memory) {
    static const char* const kNames[] = {"rdma", "rdma", "efa", "tcp", "shm", "cuda_ipc", "none", ""};
    const char* name = kNames[random.below(std::size(kNames))];
    return question(random, static_cast<Asking>(random.below(3)), name, memory);
}

// Everything there is to say, once.
std::vector<std::byte> script(Random& random, Engine& target, Memory& memory, uint32_t channel) {
    std::vector<std::byte> out = hello(target, channel);
    auto append = [&](const std::vector<std::byte>& more) {
        out.insert(out.end(), more.begin(), more.end());
    };
    for (uint64_t n = random.between(1, 6); n > 0; --n) {
        std::vector<std::byte> body, one;
        switch (random.below(7)) {
            case 5:
            case 6:
                frame(one, Kind::kEngineAsk, any_question(random, memory));
                break;
            case 0:
                frame(one, Kind::kEngineRegions, {});
                break;
            case 1:
                body.resize(random.below(300), std::byte{1});
                frame(one, Kind::kEngineNotify, body);
                break;
            case 2: {
                Writer w(body);
                body.reserve(64);
                w.number(uint32_t{1});
                w.number(static_cast<uint32_t>(random.below(2) == 0 ? channel + 1 : random.below(100)));
                frame(one, Kind::kEngineFence, body);
                break;
            }
            default: {
                std::vector<TransferRow> rows;
                for (uint64_t k = random.between(1, 20); k > 0; --k) {
                    auto length = static_cast<uint32_t>(random.below(3000));
                    uint64_t address = memory.address() + random.below(memory.size() - length);
                    if (random.one_in(10)) address = random.next();
                    rows.push_back({address, length, static_cast<uint32_t>(random.below(2))});
                }
                one = transfer(rows);
            }
        }
        append(one);
    }
    return out;
}

void mutate(Random& random, std::vector<std::byte>& bytes) {
    for (uint64_t n = random.between(1, 4); n > 0 && !bytes.empty(); --n) {
        size_t at = random.below(bytes.size());
        switch (random.below(6)) {
            case 0:
                bytes[at] ^= std::byte(1 << random.below(8));
                break;
            case 1:
                bytes[at] = std::byte(random.below(256));
                break;
            case 2:
                bytes.resize(at);
                break;
            case 3:
                bytes.erase(bytes.begin() + static_cast<long>(at),
                            bytes.begin() + static_cast<long>(at + random.below(bytes.size() - at)));
                break;
            case 4:
                bytes.insert(bytes.begin() + static_cast<long>(at), random.between(1, 40), std::byte{0xFF});
                break;
            case 5: {
                uint32_t large = random.one_in(2) ? UINT32_MAX : static_cast<uint32_t>(random.next());
                std::memcpy(bytes.data() + at, &large, std::min<size_t>(4, bytes.size() - at));
                break;
            }
        }
    }
}

// Sends all of it while reading what comes, and hangs up at the end, or when the peer does.
void speak(int fd, const std::vector<std::byte>& bytes, bool wait_for_end) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    size_t sent = 0;
    std::byte nothing[65536];
    while (sent < bytes.size() || wait_for_end) {
        pollfd p{fd, static_cast<short>(sent < bytes.size() ? POLLIN | POLLOUT : POLLIN), 0};
        if (::poll(&p, 1, sent < bytes.size() ? 5000 : 20) <= 0) break;
        if ((p.revents & POLLIN) != 0 && ::recv(fd, nothing, sizeof(nothing), 0) == 0) break;
        if ((p.revents & (POLLERR | POLLHUP)) != 0) break;
        if ((p.revents & POLLOUT) == 0) continue;
        ssize_t n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
        if (n < 0) break;
        sent += static_cast<size_t>(n);
    }
}

}  // namespace

TEST_CASE("hostile: mutated and random frames over TCP") {
    Random random(360);
    Asked nics;
    EngineOptions options = engine_options("there", "");
    auto there = make_engine(options);
    Memory memory(*there, 100000, MemoryKind::kHost);
    auto here = make_engine(engine_options("here", "tcp"));
    uint32_t segment = *here->open(there->addresses().front());
    Memory mine(*here, 4096, MemoryKind::kHostArena);
    for (uint32_t round = 0; round < 250; ++round) {
        Result<Dialed> dialed = dial(to(*there));
        REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
        std::vector<std::byte> bytes;
        if (random.one_in(5)) {
            bytes = hello(*there, round);
            for (uint64_t n = random.below(500); n > 0; --n) bytes.push_back(std::byte(random.below(256)));
        } else {
            bytes = script(random, *there, memory, round);
            if (!random.one_in(8)) mutate(random, bytes);
        }
        speak(dialed->fd.get(), bytes, random.one_in(2));
        if (round % 10 != 0) continue;
        memory.check_margin();
        REQUIRE(there->check_integrity());
        std::vector<Slice> slices = {{mine.address(), memory.address(), 4096, Direction::kRead}};
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        REQUIRE(here->transfer(request).ok());
        (void)there->notifications();
    }
    CHECK(metric(*there, "protocol_errors_total") > 10);
    MESSAGE("protocol errors: " << metric(*there, "protocol_errors_total"));
}

namespace {

// An initiator that says what it likes, and reads the answers.
class Liar {
   public:
    explicit Liar(Engine& engine, uint32_t channel = 1) : dialed_(std::move(*dial(to(engine)))) {
        set_socket_timeouts(fd(), 20000);
        send(hello(engine, channel));
        CHECK(answer().kind == Kind::kEngineHello);
    }
    int fd() const { return dialed_.fd.get(); }
    void send(const std::vector<std::byte>& bytes) {
        REQUIRE(::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    }
    FrameHeader ask(const std::vector<std::byte>& question) {
        std::vector<std::byte> bytes;
        frame(bytes, Kind::kEngineAsk, question, ++asked_);
        send(bytes);
        FrameHeader header = answer();
        if (header.request_id != 0) CHECK(header.request_id == asked_);
        return header;
    }
    // Of an ERROR: its code.
    FrameHeader answer() {
        FrameHeader header;
        receive(&header, sizeof(header));
        body.resize(header.length);
        receive(body.data(), body.size());
        code = header.kind == Kind::kError ? Reader(body).number<uint16_t>() : uint16_t{0xffff};
        return header;
    }

    std::vector<std::byte> body;
    uint16_t code = 0;

   private:
    void receive(void* to, size_t size) {
        if (size != 0) REQUIRE(::recv(fd(), to, size, MSG_WAITALL) == static_cast<ssize_t>(size));
    }
    Dialed dialed_;
    uint64_t asked_ = 1;
};

}  // namespace

TEST_CASE("hostile: questions for a transport, whole, cut at each byte, and longer") {
    Random random(363);
    Asked nics;
    auto there = make_engine(engine_options("there", ""));
    Memory memory(*there, 100000, MemoryKind::kHost);
    Liar liar(*there);
    std::vector<std::string> served = {"rdma"};
    if (nics.fabric) served.emplace_back("efa");
    for (const std::string& transport : served) {
        CAPTURE(transport);
        const size_t name_bytes = 2 + transport.size();
        std::vector<std::vector<std::byte>> whole = {
            nic::keys_question(transport, {{memory.address(), 1000}, {memory.address() + 5000, 10}, {1, 1}}),
            nic::end_question(transport, 5)};
        if (transport == "rdma") {
            std::vector<std::byte> end;
            Writer w(end);
            rdma::encode(w,
                         {{false, 5, 0, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 8, 1, 1}}, 77, 1, 16});
            whole.push_back(nic::connect_question(transport, 5, 0, end));
        } else {
            // An address of a socket that no process has: 127.0.0.1:9.
            std::vector<std::byte> address(16);
            address[0] = std::byte{2}, address[3] = std::byte{9};
            address[4] = std::byte{127}, address[7] = std::byte{1};
            whole.push_back(nic::connect_question(transport, 5, 0, efa::encode_endpoint({true, address})));
        }
        for (const std::vector<std::byte>& question : whole) {
            const bool connects = &question == &whole.back();
            CHECK(liar.ask(question).kind == Kind::kEngineAsk);
            for (size_t size = name_bytes; size < question.size(); ++size) {
                CAPTURE(size);
                CHECK(liar.ask({question.begin(), question.begin() + static_cast<long>(size)}).kind ==
                      Kind::kError);
                CHECK(liar.code == static_cast<uint16_t>(Code::kProtocol));
            }
            std::vector<std::byte> longer = question;
            longer.push_back(std::byte{0});
            // A later version may append to a question for a connection.
            CHECK((liar.ask(longer).kind == Kind::kEngineAsk) == connects);
            CHECK(liar.ask(question).kind == Kind::kEngineAsk);
        }
        // What there is not: a port, a question, more ranges than a question has.
        std::vector<std::byte> wrong = whole.back();
        wrong[name_bytes + 5] = std::byte{200};
        CHECK(liar.ask(wrong).kind == Kind::kError);
        wrong[name_bytes] = std::byte{3};
        CHECK(liar.ask(wrong).kind == Kind::kError);
        CHECK(liar.ask(nic::keys_question(transport, std::vector<nic::Range>(129))).kind == Kind::kError);
        CHECK(liar.ask(nic::keys_question(transport, std::vector<nic::Range>(128))).kind == Kind::kEngineAsk);
        // An initiator has 64 connections at most, and all of them again once they have ended.
        for (int round = 0; round < 2; ++round) {
            auto pair = [&](uint32_t number) {
                std::vector<std::byte> one = whole.back();
                std::memcpy(&one[name_bytes + 1], &number, sizeof(number));
                return liar.ask(one).kind;
            };
            if (transport == "efa") break;  // an endpoint takes milliseconds
            for (uint32_t i = 0; i < 64; ++i) CHECK(pair(i) == Kind::kEngineAsk);
            CHECK(pair(64) == Kind::kError);
            CHECK(liar.code == static_cast<uint16_t>(Code::kTooLarge));
            for (uint32_t i = 0; i < 64; ++i) {
                CHECK(liar.ask(nic::end_question(transport, i)).kind == Kind::kEngineAsk);
            }
        }
    }
    for (const char* none : {"tcp", "shm", "cuda_ipc", "loopback", "none", ""}) {
        CHECK(liar.ask(nic::end_question(none, 5)).kind == Kind::kError);
    }
    // Without a name it is no question.
    CHECK(liar.ask({std::byte{9}}).kind == Kind::kError);
    CHECK(metric(*there, "protocol_errors_total") == 1);
    CHECK(there->check_integrity());
}

TEST_CASE("hostile: mutated questions for transports, of many initiators, beside a peer that goes on") {
    Random random(364);
    Asked nics;
    auto there = make_engine(engine_options("there", ""));
    Memory memory(*there, 100000, MemoryKind::kHost);
    auto here = make_engine(engine_options("here", "rdma"));
    uint32_t segment = *here->open(there->addresses().front());
    Memory mine(*here, 4096, MemoryKind::kHostArena);
    for (uint32_t round = 0; round < 120; ++round) {
        Result<Dialed> dialed = dial(to(*there));
        REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
        std::vector<std::byte> bytes = hello(*there, round);
        for (uint64_t n = random.between(1, 12); n > 0; --n) {
            std::vector<std::byte> body = any_question(random, memory);
            // The frame stays whole, so that the transport sees what was changed.
            if (random.one_in(2)) mutate(random, body);
            body.resize(std::min<size_t>(body.size(), 4096));
            frame(bytes, Kind::kEngineAsk, body, n);
        }
        speak(dialed->fd.get(), bytes, random.one_in(2));
        if (round % 10 != 0) continue;
        memory.check_margin();
        std::vector<Slice> slices = {{mine.address(), memory.address(), 4096, Direction::kRead}};
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        Result<uint64_t> moved = here->transfer(request);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        REQUIRE(there->check_integrity());
    }
    CHECK(metric(*here, "rdma_read_bytes_total") != 0);
}

// ---- slow peers

TEST_CASE("hostile: a peer that sends one byte now and then does not keep its place") {
    constexpr int kStalledMs = 300;
    EngineOptions options = engine_options("there", "");
    options.limits.stalled_frame_ms = kStalledMs;
    auto there = make_engine(options);
    Memory memory(*there, 8 << 20, MemoryKind::kHost);
    // Inside of the payload of a write, of a message, and of the head of a frame.
    std::vector<std::byte> write = transfer({{memory.address(), 1 << 20, 1}}), message, ask;
    write.resize(write.size() - (1 << 20));
    frame(message, Kind::kEngineNotify, std::vector<std::byte>(100000));
    message.resize(sizeof(FrameHeader));
    frame(ask, Kind::kEngineAsk, nic::end_question("rdma", 1));
    for (const std::vector<std::byte>* begun : {&write, &message}) {
        Liar liar(*there);
        const auto begin = steady_clock::now();
        liar.send(*begun);
        int64_t ms = drip(liar.fd(), {}, begin);
        CHECK(ms >= kStalledMs / 2);
    }
    {
        Liar liar(*there);
        int64_t ms = drip(liar.fd(), ask);
        CHECK(ms >= kStalledMs / 2);
    }
    // Answers that it does not read in time.
    {
        Liar liar(*there);
        std::vector<std::byte> reads;
        for (int i = 0; i < 4; ++i) {
            std::vector<std::byte> one = transfer({{memory.address(), 8 << 20, 0}});
            reads.insert(reads.end(), one.begin(), one.end());
        }
        const auto begin = steady_clock::now();
        liar.send(reads);
        // What it would see of that stands behind what it does not read.
        while (metric(*there, "connections") != 0 && steady_clock::now() - begin < std::chrono::seconds(8)) {
            ::poll(nullptr, 0, 5);
        }
        CHECK(metric(*there, "connections") == 0);
        CHECK(steady_clock::now() - begin >= std::chrono::milliseconds(kStalledMs / 2));
    }
    // One that is at rest between frames stays.
    Liar idle(*there);
    pollfd over{idle.fd(), POLLIN | POLLRDHUP, 0};
    CHECK(::poll(&over, 1, 3 * kStalledMs) == 0);
    idle.ask(nic::end_question("none", 1));
}

TEST_CASE("hostile: before HELLO, and on the Unix socket, a byte now and then keeps no place either") {
    EngineOptions options = engine_options("there", "");
    options.limits.handshake_ms = 4000;  // more than a busy machine takes between connect() and SHM_OPEN
    options.limits.stalled_frame_ms = 300;
    auto there = make_engine(options);
    Result<Dialed> dialed = dial(to(*there));
    REQUIRE(dialed.ok());
    std::vector<std::byte> bytes;
    frame(bytes, Kind::kEngineHello, std::vector<std::byte>(4000));
    CHECK(drip(dialed->fd.get(), bytes) != 0);
    transport::PeerInfo info = *transport::decode_welcome(dialed->welcome);
    for (bool proved : {false, true}) {
        CAPTURE(proved);
        Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        socklen_t size = transport::host::abstract_address(info.shm.socket, address);
        REQUIRE(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
        set_socket_timeouts(fd.get(), 20000);
        bytes.clear();
        if (proved) {
            std::vector<std::byte> body;
            Writer w(body);
            w.bytes(info.shm.cookie.data(), info.shm.cookie.size());
            w.text16(info.host_id);
            w.text16(info.boot_id);
            frame(bytes, Kind::kShmOpen, body);
            REQUIRE(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
                    static_cast<ssize_t>(bytes.size()));
            std::byte answer[sizeof(FrameHeader) + 16];
            REQUIRE(::recv(fd.get(), answer, sizeof(answer), MSG_WAITALL) ==
                    static_cast<ssize_t>(sizeof(answer)));
            CHECK(Kind(answer[5]) == Kind::kShmOpen);
            // It is at rest for longer than a frame may take.
            CHECK_FALSE(readable(fd.get(), 2000));
            bytes.clear();
            frame(bytes, Kind::kEngineRegions, std::vector<std::byte>(4000));
        } else {
            frame(bytes, Kind::kShmOpen, std::vector<std::byte>(4000));
        }
        CHECK(drip(fd.get(), bytes) != 0);
    }
}

TEST_CASE("hostile: a frame that promises much costs nothing") {
    auto there = make_engine(engine_options("there", ""));
    for (Kind kind :
         {Kind::kEngineTransfer, Kind::kEngineNotify, Kind::kEngineRegions, Kind::kStat, Kind{200}}) {
        Dialed dialed = std::move(*dial(to(*there)));
        std::vector<std::byte> bytes = hello(*there, static_cast<uint32_t>(kind));
        size_t at = begin_frame(bytes, kind, 0, 9);
        uint32_t huge = 0xFFFFFFF0;
        std::memcpy(bytes.data() + at + 8, &huge, sizeof(huge));
        REQUIRE(::send(dialed.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
                static_cast<ssize_t>(bytes.size()));
        std::vector<std::byte> answer(4096);
        size_t have = 0;
        for (;;) {  // the HELLO's answer, the ERROR, and the end
            ssize_t n = ::recv(dialed.fd.get(), answer.data() + have, answer.size() - have, 0);
            if (n <= 0) break;
            have += static_cast<size_t>(n);
        }
        FrameHeader header;
        REQUIRE(have > sizeof(header) * 2 + 2);
        std::memcpy(&header, answer.data() + sizeof(header) + 2, sizeof(header));
        CHECK(header.kind == Kind::kError);
        CHECK(header.request_id == 0);
    }
    CHECK(metric(*there, "protocol_errors_total") == 5);
}

TEST_CASE("hostile: what is not an engine's first frame") {
    auto there = make_engine(engine_options("there", ""));
    Dialed dialed = std::move(*dial(to(*there)));
    std::vector<std::byte> bytes;
    frame(bytes, Kind::kEngineRegions, {});
    speak(dialed.fd.get(), bytes, true);
    // It counts before it hangs up.
    pollfd over{dialed.fd.get(), POLLIN, 0};
    std::byte said[64];
    while (::poll(&over, 1, 10000) == 1 && ::recv(dialed.fd.get(), said, sizeof(said), 0) > 0) {
    }
    CHECK(metric(*there, "protocol_errors_total") == 1);
}

TEST_CASE("hostile: random bytes on the Unix socket, and a cookie that was guessed") {
    Random random(361);
    Bed bed(Policy::kShuffled, 79);  // memory of cards, so that there is a socket for their handles
    {
        auto there = make_engine(engine_options("there", ""));
        Memory arena(*there, 8192, MemoryKind::kHostArena), card(*there, 8192, MemoryKind::kDevice);
        Result<Dialed> dialed = dial(to(*there));
        REQUIRE(dialed.ok());
        transport::PeerInfo info = *transport::decode_welcome(dialed->welcome);
        REQUIRE_FALSE(info.cuda_ipc.socket.empty());
        for (int round = 0; round < 120; ++round) {
            const transport::HostOffer& offer = round % 2 == 0 ? info.shm : info.cuda_ipc;
            Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            sockaddr_un address{};
            socklen_t size = transport::host::abstract_address(offer.socket, address);
            REQUIRE(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
            std::vector<std::byte> bytes, body, proof;
            body.reserve(1024);
            Writer w(body);
            if (round > 1) w.bytes(offer.cookie.data(), offer.cookie.size());
            if (round <= 1) body.resize(32);
            w.text16(info.host_id);
            w.text16(info.boot_id);
            frame(proof, Kind::kShmOpen, body);
            // Questions of either socket on both of them, with ids that there are and others.
            for (int n = 0; n < 4; ++n) {
                body.clear();
                switch (random.below(4)) {
                    case 0:
                        body = transport::regions_question(info, random.one_in(2) ? 0 : random.below(9));
                        frame(bytes, Kind::kEngineRegions, body);
                        break;
                    case 1:
                        frame(bytes, Kind::kCudaRegions, {});
                        break;
                    case 2:
                        frame(bytes, Kind::kEngineRegions, {});
                        break;
                    default:
                        w.number(random.one_in(2) ? random.below(4) : random.next());
                        frame(bytes, Kind::kShmMap, body);
                }
            }
            // Half of the sessions are open before the first wrong byte.
            if (round > 3 && random.one_in(2)) mutate(random, bytes);
            bytes.insert(bytes.begin(), proof.begin(), proof.end());
            if (round > 3 && random.one_in(2)) mutate(random, bytes);
            speak(fd.get(), bytes, true);
        }
        auto here = make_engine(engine_options("here", "shm"));
        CHECK(here->open(there->addresses().front()).ok());
        CHECK(there->check_integrity());
        (void)there->close();
    }
    bed.end();
}

TEST_CASE("hostile: a target that answers anything") {
    Random random(362);
    ListenerOptions door;
    door.addresses = {"127.0.0.1:0"};
    door.token = "secret";
    Result<std::unique_ptr<Listener>> made = Listener::create(std::move(door));
    REQUIRE(made.ok());
    std::unique_ptr<Listener> listener = std::move(*made);
    transport::PeerInfo self;
    self.name = "liar";
    std::mutex mutex;
    std::vector<std::thread> threads;
    std::atomic<uint64_t> turn{0};
    listener->offer(std::string(kServiceEngine),
                    Service{[&](std::string_view) -> Result<std::vector<std::byte>> {
                                return transport::encode_welcome(self);
                            },
                            [&](AuthenticatedConnection caller) {
                                std::lock_guard lock(mutex);
                                threads.emplace_back([&, fd = std::make_shared<Fd>(std::move(caller.fd))] {
                                    Random own(400 + turn++);
                                    ::fcntl(fd->get(), F_SETFL, ::fcntl(fd->get(), F_GETFL) & ~O_NONBLOCK);
                                    set_socket_timeouts(fd->get(), 3000);
                                    std::vector<std::byte> in(1 << 20), out, body(2, std::byte{1});
                                    frame(out, Kind::kEngineHello, body, 1);
                                    if (::recv(fd->get(), in.data(), in.size(), 0) <= 0) return;
                                    (void)::send(fd->get(), out.data(), out.size(), MSG_NOSIGNAL);
                                    // The right answers to a read of 1,000 and 3,000 bytes, more or less.
                                    for (uint64_t id = 2; id < 6; ++id) {
                                        if (::recv(fd->get(), in.data(), in.size(), 0) <= 0) return;
                                        out.clear();
                                        body.clear();
                                        body.reserve(8192);
                                        Writer w(body);
                                        w.number(uint32_t{2});
                                        bool refuses = own.one_in(2);
                                        w.number(uint32_t{refuses});
                                        if (refuses) {
                                            w.number(uint16_t{0x0001});
                                            w.number(uint16_t{0});
                                            w.text16("no");
                                        }
                                        body.resize(body.size() + (refuses ? 3000 : 4000), std::byte{7});
                                        frame(out, Kind::kEngineTransfer, body, id);
                                        out[6] = std::byte{1};
                                        if (own.one_in(6)) {
                                            out.clear();
                                            frame(out, Kind::kError, std::vector<std::byte>(own.below(9)), 0);
                                        }
                                        if (!own.one_in(3)) mutate(own, out);
                                        (void)::send(fd->get(), out.data(), out.size(), MSG_NOSIGNAL);
                                        if (own.one_in(3)) return;
                                    }
                                });
                            }});
    REQUIRE(listener->start().ok());
    EngineOptions options = engine_options("here", "tcp");
    options.timeout_ms = 300;
    auto here = make_engine(options);
    Memory mine(*here, 5000, MemoryKind::kHost);
    int good = 0, bad = 0;
    for (int round = 0; round < 60; ++round) {
        Result<uint32_t> segment = here->open(listener->addresses().front());
        if (!segment) continue;
        for (int k = 0; k < 2; ++k) {
            std::vector<Slice> slices = {{mine.address(), 1000, 1000, Direction::kRead},
                                         {mine.address() + 1000, 9000, 3000, Direction::kRead}};
            TransferRequest request;
            request.segments = {&*segment, 1};
            request.slices = slices;
            Result<uint64_t> moved = here->transfer(request);
            (moved.ok() ? good : bad) += 1;
            mine.check_margin();
        }
        (void)here->close_segment(*segment);
    }
    std::cerr << "a lying target: " << good << " transfers went well, " << bad << " failed\n";
    CHECK(bad > 10);
    (void)here->close();
    listener->stop();
    for (std::thread& thread : threads) thread.join();
    CHECK(here->check_integrity());
}
