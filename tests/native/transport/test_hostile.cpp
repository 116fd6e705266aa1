// Peers that send anything: random bytes, frames with bits flipped, half frames, too many of them. Whatever
// comes, only registered memory is written, the engine serves others on, and a caller gets an error.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <iostream>
#include <mutex>
#include <thread>

#include "bed.hpp"
#include "transport/frames.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::TransferRow;

namespace {

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

// Everything there is to say, once.
std::vector<std::byte> script(Random& random, Engine& target, Memory& memory, uint32_t channel) {
    std::vector<std::byte> out = hello(target, channel);
    auto append = [&](const std::vector<std::byte>& more) {
        out.insert(out.end(), more.begin(), more.end());
    };
    for (uint64_t n = random.between(1, 6); n > 0; --n) {
        std::vector<std::byte> body, one;
        switch (random.below(5)) {
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
    auto there = make_engine(engine_options("there", ""));
    Result<Dialed> dialed = dial(to(*there));
    REQUIRE(dialed.ok());
    transport::PeerInfo info = *transport::decode_welcome(dialed->welcome);
    for (int round = 0; round < 60; ++round) {
        Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::memcpy(address.sun_path + 1, info.shm.socket.data(), info.shm.socket.size());
        auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + info.shm.socket.size());
        REQUIRE(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
        std::vector<std::byte> bytes, body;
        body.reserve(1024);
        Writer w(body);
        if (round != 0) w.bytes(info.shm.cookie.data(), info.shm.cookie.size());
        if (round == 0) body.resize(32);
        w.text16(info.host_id);
        w.text16(info.boot_id);
        frame(bytes, Kind::kShmOpen, body);
        frame(bytes, Kind::kEngineRegions, {});
        body.assign(8, std::byte{1});
        frame(bytes, Kind::kShmMap, body);
        if (round > 1) mutate(random, bytes);
        speak(fd.get(), bytes, true);
    }
    auto here = make_engine(engine_options("here", "shm"));
    CHECK(here->open(there->addresses().front()).ok());
    CHECK(there->check_integrity());
}

TEST_CASE("hostile: a target that answers anything") {
    Random random(362);
    ListenerOptions door;
    door.addresses = {"127.0.0.1:0"};
    door.token = "secret";
    Result<std::unique_ptr<Listener>> made = Listener::create(door);
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
