// The questions that an initiator asks a peer of its host, where the peer answers late, in pieces or never.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/event_loop.hpp"
#include "transport/host/client.hpp"
#include "transport/host/server.hpp"
#include "transport/host/unix_frame.hpp"

namespace moonpool::testing {
namespace {

using transport::host::Client;
using transport::host::Gate;
using transport::host::Patience;
using transport::host::UnixFrameReader;

constexpr int kLongMs = 30000;

// The peer's end, played by the test: it reads a question when told, and answers when told.
struct SlowPeer {
    std::unique_ptr<EventLoop> loop = std::move(*EventLoop::create({}));
    transport::Identity self;
    transport::PeerInfo info;
    Fd listener{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    Fd fd;
    UnixFrameReader reader{1u << 20};
    std::unique_ptr<Gate> gate = std::move(*Gate::create(1));
    Client client{*loop};

    SlowPeer() {
        REQUIRE(loop->start().ok());
        self.boot_id = info.boot_id = "boot";
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) == 0);
        socklen_t size = sizeof(address);
        REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
        info.shm.socket = std::string(address.sun_path + 1, size - sizeof(sa_family_t) - 1);
        REQUIRE(::listen(listener.get(), 8) == 0);
    }
    ~SlowPeer() { loop->stop(); }

    void open() {
        std::thread peer([&] {
            fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
            std::vector<std::byte> body;
            Writer w(body);
            w.number(gate->page().nonce);
            w.number(uint64_t{0});
            answer(question(), body, gate->fd());
        });
        Result<Client::Turn> turn = client.turn(Patience::until(kLongMs));
        Status opened = turn->open(info.shm, info, self);
        peer.join();
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
    }
    uint64_t question() {
        for (;;) {
            Result<bool> whole = reader.read(fd.get());
            if (!whole) return 0;
            if (*whole) return reader.header().request_id;
            pollfd readable{fd.get(), POLLIN, 0};
            if (::poll(&readable, 1, kLongMs) != 1) return 0;
        }
    }
    static std::vector<std::byte> frame_of(uint64_t id, const std::vector<std::byte>& body) {
        std::vector<std::byte> frame;
        begin_frame(frame, Kind::kShmMap, kFlagAnswer, id);
        frame.insert(frame.end(), body.begin(), body.end());
        finish_frame(frame, 0);
        return frame;
    }
    void answer(uint64_t id, const std::vector<std::byte>& body, int passed) {
        std::vector<std::byte> frame = frame_of(id, body);
        CHECK(transport::host::send_part(fd.get(), frame, 0, passed, 0) == ssize_t(frame.size()));
    }
    Status ask(const Patience& patience, std::vector<std::byte>* answer = nullptr) {
        Result<Client::Turn> turn = client.turn(patience);
        if (!turn) return turn.error();
        Status asked = turn->ask(Kind::kShmMap, {});
        if (asked && answer != nullptr) *answer = turn->answer();
        return asked;
    }
};

std::vector<std::byte> bytes(size_t n, int value) { return std::vector<std::byte>(n, std::byte(value)); }

}  // namespace

TEST_CASE(
    "host client: an answer that comes too late, whole or in pieces, is not that of the next question") {
    for (size_t before : {size_t{0}, size_t{1}, sizeof(FrameHeader) - 1, sizeof(FrameHeader) + 5}) {
        CAPTURE(before);  // bytes of the answer that come in time
        SlowPeer peer;
        peer.open();
        std::vector<std::byte> late = SlowPeer::frame_of(2, bytes(64, 1));
        REQUIRE(::send(peer.fd.get(), late.data(), before, 0) == ssize_t(before));
        Status first = peer.ask(Patience::until(30));
        REQUIRE_FALSE(first.ok());
        CHECK(first.error().code == Code::kTimeout);
        CHECK(peer.question() == 2);
        // Nothing is asked while that one has no answer.
        Status second = peer.ask(Patience::until(30));
        REQUIRE_FALSE(second.ok());
        CHECK(second.error().code == Code::kTimeout);

        std::thread rest([&] {
            CHECK(::send(peer.fd.get(), late.data() + before, late.size() - before, 0) ==
                  ssize_t(late.size() - before));
            CHECK(peer.question() == 3);
            peer.answer(3, bytes(8, 2), -1);
        });
        std::vector<std::byte> answer;
        CHECK(peer.ask(Patience::until(kLongMs), &answer).ok());
        rest.join();
        CHECK(answer == bytes(8, 2));
        CHECK(peer.client.alive());
    }
}

TEST_CASE("host client: the descriptor of an answer that comes too late is closed") {
    SlowPeer peer;
    peer.open();
    REQUIRE_FALSE(peer.ask(Patience::until(1)).ok());
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    Fd reading(ends[0]);
    {
        Fd writing(ends[1]);
        CHECK(peer.question() == 2);
        peer.answer(2, {}, writing.get());
    }
    std::thread rest([&] { peer.answer(peer.question(), {}, -1); });
    CHECK(peer.ask(Patience::until(kLongMs)).ok());
    rest.join();
    pollfd ended{reading.get(), POLLIN, 0};
    REQUIRE(::poll(&ended, 1, kLongMs) == 1);
    CHECK((ended.revents & POLLHUP) != 0);  // no descriptor of the writing end is left
}

TEST_CASE(
    "host client: a caller behind one that waits longer, or whose job is stopped, leaves at its own time") {
    SlowPeer peer;
    peer.open();
    std::atomic<bool> closing{false};
    transport::Job job;
    job.closing = &closing;
    job.timeout_ms = kLongMs;
    job.progress_ns = now_ns();
    auto held = std::async(std::launch::async, [&] { return peer.ask(Patience::of(job)); });
    CHECK(peer.question() == 2);  // it has the turn
    Status behind = peer.ask(Patience::until(50));
    REQUIRE_FALSE(behind.ok());
    CHECK(behind.error().code == Code::kTimeout);
    CHECK(held.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
    job.cancelled = true;
    Status stopped = held.get();
    REQUIRE_FALSE(stopped.ok());
    CHECK(stopped.error().code == Code::kClosed);
}

TEST_CASE("host client: a job waits half of what it has left where another path follows, else all of it") {
    std::atomic<bool> closing{false};
    transport::Job job;
    job.closing = &closing;
    job.timeout_ms = 8000;
    job.progress_ns = now_ns();
    Patience half = Patience::of(job);
    job.last_path = true;
    Patience whole = Patience::of(job);
    CHECK(half.end_ns <= job.progress_ns + 5000000000);
    CHECK(whole.end_ns == job.progress_ns + 8000000000);
    job.progress_ns = now_ns() - 9000000000;
    Patience over = Patience::of(job);
    CHECK(over.end_ns <= now_ns());
    CHECK_FALSE(over.check().ok());
}

TEST_CASE("host client: an answer of another number, or that is no frame, ends the questions") {
    for (bool frame : {true, false}) {
        CAPTURE(frame);
        SlowPeer peer;
        peer.open();
        std::thread lies([&] {
            CHECK(peer.question() == 2);
            if (frame) peer.answer(7, {}, -1);
            std::vector<std::byte> garbage = bytes(64, 0xab);
            CHECK(::send(peer.fd.get(), garbage.data(), garbage.size(), 0) == ssize_t(garbage.size()));
        });
        Status first = peer.ask(Patience::until(kLongMs));
        lies.join();
        REQUIRE_FALSE(first.ok());
        CHECK(first.error().code == Code::kProtocol);
        Status second = peer.ask(Patience::until(kLongMs));
        REQUIRE_FALSE(second.ok());
        CHECK(second.error().code == Code::kProtocol);
    }
}

}  // namespace moonpool::testing
