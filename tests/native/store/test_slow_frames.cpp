// Callers of a node that send one byte now and then inside a frame: they keep neither their place nor memory.
#include <doctest/doctest.h>

#include <cstring>
#include <string_view>

#include "../drip.hpp"
#include "store/node/server.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr const char* kToken = "a token";
constexpr uint32_t kStalledMs = 300;

std::vector<std::byte> frame(Kind kind, const std::vector<std::byte>& body) {
    std::vector<std::byte> out;
    size_t at = begin_frame(out, kind, 0, 1);
    out.insert(out.end(), body.begin(), body.end());
    finish_frame(out, at);
    return out;
}

// With the default space open, whose number goes to `space`.
Fd proved(Server& server, uint32_t& space) {
    DialOptions options;
    options.address = server.addresses().at(0);
    options.token = kToken;
    options.service = kServiceStore;
    options.timeout_ms = 10000;
    Result<Dialed> dialed = dial(options);
    REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
    std::vector<std::byte> body;
    Writer w(body);
    w.text16("default");
    w.text16("");
    std::vector<std::byte> open = frame(Kind::kOpenSpace, body);
    REQUIRE(::send(dialed->fd.get(), open.data(), open.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(open.size()));
    std::byte answer[sizeof(FrameHeader) + 4];
    REQUIRE(::recv(dialed->fd.get(), answer, sizeof(answer), MSG_WAITALL) ==
            static_cast<ssize_t>(sizeof(answer)));
    CHECK(Kind(answer[5]) == Kind::kOpenSpace);
    std::memcpy(&space, answer + sizeof(FrameHeader), sizeof(space));
    return std::move(dialed->fd);
}

uint64_t gauge(Server& server, std::string_view wanted) {
    for (auto& [name, value] : server.snapshot()) {
        if (name == wanted) return value;
    }
    FAIL("no gauge " << wanted);
    return 0;
}

}  // namespace

TEST_CASE("server: one byte now and then keeps no place, and no memory of a put") {
    ServerOptions options;
    options.token = kToken;
    PoolOptions pool;
    pool.arena_bytes = 16 << 20;
    options.pools = {pool};
    options.listen = {"127.0.0.1:0"};
    options.limits.stalled_frame_ms = kStalledMs;
    auto server = Server::create(std::move(options));
    REQUIRE(server);
    REQUIRE((*server)->start());
    uint32_t space = 0;
    {
        Fd fd = proved(**server, space);
        CHECK(drip(fd.get(), frame(Kind::kList, std::vector<std::byte>(4000))) >= kStalledMs / 2);
    }
    // A put of 1 MiB, all of whose rows are there.
    Fd fd = proved(**server, space);
    std::vector<std::byte> rows, body;
    Writer r(rows), w(body);
    r.number(uint64_t{1} << 20);
    r.number(uint32_t{0});
    r.text16("key");
    r.text16("");
    w.number(space);
    w.number(uint32_t{0});  // flags
    w.number(uint32_t{1});
    w.number(static_cast<uint32_t>(rows.size()));
    w.bytes(rows.data(), rows.size());
    const size_t head = body.size();
    body.resize(head + (1 << 20));
    std::vector<std::byte> put = frame(Kind::kPut, body);
    put.resize(sizeof(FrameHeader) + head);
    const auto begin = std::chrono::steady_clock::now();
    REQUIRE(::send(fd.get(), put.data(), put.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(put.size()));
    CHECK(drip(fd.get(), {}, begin) >= kStalledMs / 2);
    CHECK(gauge(**server, "leased_bytes") == 0);
    // One that is at rest between frames stays.
    Fd idle = proved(**server, space);
    pollfd over{idle.get(), POLLIN, 0};
    CHECK(::poll(&over, 1, 3 * kStalledMs) == 0);
    CHECK((*server)->check_integrity());
}
