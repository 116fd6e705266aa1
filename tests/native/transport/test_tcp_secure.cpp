// What TLS holds of a connection between engines.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <csignal>
#include <cstring>
#include <vector>

#include "../certificates.hpp"
#include "transport/tcp/run.hpp"
#include "wire/error_frame.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport;

namespace {

// Both ends of one connection, behind the handshake.
struct Pair {
    Fd near, far;
    std::unique_ptr<TlsStream> client, server;

    Pair() {
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        near = Fd(ends[0]);
        far = Fd(ends[1]);
        auto dialling = tls_client("authority", "localhost")->open("localhost:1");
        auto called = tls_server()->open();
        REQUIRE(dialling.ok());
        REQUIRE(called.ok());
        client = std::move(*dialling);
        server = std::move(*called);
        for (bool done = false; !done;) {
            auto one = client->handshake(near.get()), other = server->handshake(far.get());
            REQUIRE(one != TlsStream::Step::kFailed);
            REQUIRE(other != TlsStream::Step::kFailed);
            done = one == TlsStream::Step::kDone && other == TlsStream::Step::kDone;
        }
    }
};

}  // namespace

TEST_CASE("tcp: of a peer that closes while TLS holds bytes for it, the reason that it sent is told") {
    Pair pair;
    auto staging = std::make_shared<tcp::StagingPool>();
    REQUIRE(staging->reserve());
    tcp::Channel channel(std::move(pair.near), std::move(pair.client), 1, "a line", tcp::kFrameBytes);
    channel.staging = staging;
    TransportCounters moved;
    Counters counters;
    tcp::Queue queue(moved, counters);
    tcp::Run run(channel, queue, nullptr);
    RegionTable table;
    std::vector<std::byte> bytes(4u << 20);
    auto address = reinterpret_cast<uint64_t>(bytes.data());
    std::array<Region*, 1> locals = {table.add(address, bytes.size(), "", {})->get()};
    std::array<Slice, 1> slices = {Slice{address, 4096, bytes.size(), Direction::kWrite}};
    std::array<std::atomic<SliceState>, 1> states{};
    std::atomic<bool> closing{false};
    auto job = std::make_shared<Job>();
    job->slices = slices;
    job->states = states;
    job->locals = locals;
    job->regions = table.all();
    job->closing = &closing;
    job->waiting = 1;
    std::shared_ptr<tcp::Task> task = queue.add(job, nullptr, nullptr);
    const uint64_t id = channel.next_request;
    REQUIRE(run.step() == tcp::Run::Step::kMoved);
    REQUIRE(channel.socket().unsent());
    std::vector<std::byte> reason;
    write_error(reason, Code::kProtocol, "a frame breaks the format", id);
    REQUIRE(pair.server->send(pair.far.get(), reason.data(), reason.size()) ==
            static_cast<ssize_t>(reason.size()));
    pair.far.reset();
    CHECK(run.step() == tcp::Run::Step::kFailed);
    CHECK(run.error().text == "a frame breaks the format");
    run.fail(run.error());
    queue.close();
    REQUIRE(task->ended());
}

TEST_CASE("tcp: small ranges pass TLS in few records, and what is not mapped is told by its number") {
    Pair pair;
    tcp::StagingPool staging;
    REQUIRE(staging.reserve());
    std::vector<std::byte> bytes(4096 * 2);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
    std::vector<iovec> parts;
    for (size_t i = 0; i < 64; ++i) parts.push_back({bytes.data() + i * 128, 64});
    tcp::SecureSocket out{pair.near.get(), pair.client.get(), &staging};
    REQUIRE(out.send(parts.data(), parts.size(), false) == 64 * 64);
    std::vector<std::byte> came(1u << 16);
    REQUIRE(pair.server->receive(pair.far.get(), came.data(), came.size()) == 64 * 64);  // one record
    for (size_t i = 0; i < 64; ++i) CHECK(std::memcmp(&came[i * 64], &bytes[i * 128], 64) == 0);

    void* gone = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(gone != MAP_FAILED);
    std::array<std::byte, 64> first{}, last{};
    std::array<iovec, 3> to = {iovec{first.data(), 64}, iovec{gone, 64}, iovec{last.data(), 64}};
    std::vector<size_t> unmapped;
    CHECK(out.put(to.data(), to.size(), came.data(), 192, &unmapped) == 192);
    CHECK(unmapped == std::vector<size_t>{1});
    CHECK(std::memcmp(first.data(), came.data(), 64) == 0);
    CHECK(std::memcmp(last.data(), came.data() + 128, 64) == 0);
    CHECK(out.put(to.data(), to.size(), came.data(), 192, nullptr) == -1);
    CHECK(errno == EFAULT);
    ::munmap(gone, 4096);
}

TEST_CASE("tcp: without memory to copy through a connection cannot be reserved, unless there is some") {
    auto before = std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
    tcp::StagingPool has, has_none;
    REQUIRE(has.reserve());
    rlimit small{4096, limit.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    Status refused = has_none.reserve(), granted = has.reserve();
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    std::signal(SIGXFSZ, before);
    CHECK(granted.ok());
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().text.find("no memory that TLS copies through can be had") == 0);
}
