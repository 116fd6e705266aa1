// A server with a disk that does what the test wants: it stands still, fails, or flips bits.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "../ssd/fake_disk.hpp"
#include "store/client/client.hpp"
#include "store/node/server.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using moonpool::ssd::testing::fake_disk;
using moonpool::ssd::testing::FakeDisk;

namespace {

constexpr const char* kToken = "a token";
constexpr uint64_t kObject = 32 << 10;

std::unique_ptr<Server> make_server(const std::shared_ptr<FakeDisk>& disk, double clean_share = 1.0,
                                    uint64_t arena = 4 << 20) {
    ServerOptions options;
    options.token = kToken;
    PoolOptions pool;
    pool.arena_bytes = arena;
    options.pools = {pool};
    options.ssd.directories = {{"/disk", 65536 + (16 << 20)}};
    options.ssd.segment_bytes = 512 << 10;
    options.ssd.io = "threads";
    options.ssd.depth = 4;
    options.ssd.clean_share = clean_share;
    options.ssd.stop_ms = 20000;
    options.ssd.open = disk->opener();
    options.listen = {"127.0.0.1:0"};
    auto server = Server::create(std::move(options));
    REQUIRE_MESSAGE(server.ok(), server.error().text);
    REQUIRE((*server)->start());
    return std::move(*server);
}

ClientOptions dialing(Server& server) {
    ClientOptions options;
    options.dial = [&server] { return server.dial(); };
    options.token = kToken;
    options.timeout_ms = 20000;
    return options;
}

std::string content(uint64_t number) {
    std::string data(kObject, static_cast<char>('a' + number % 26));
    data.replace(0, 8, std::to_string(10'000'000 + number));
    return data;
}

std::string name_of(uint64_t number) { return "k" + std::to_string(number); }

PutOutcome put(Client& client, uint64_t number, bool replace = false, std::string_view group = {}) {
    std::string data = content(number);
    MemoryRef part = MemoryRef::host(data.data(), data.size());
    std::string name = name_of(number);
    PutItem item{name, {}, {&part, 1}, group};
    PutOptions options;
    options.replace = replace;
    auto report = client.put({&item, 1}, options);
    REQUIRE_MESSAGE(report.ok(), report.error().text);
    return report->outcomes[0];
}

std::optional<std::string> get(Client& client, uint64_t number) {
    std::string into(kObject, '\0');
    MemoryRef part = MemoryRef::host(into.data(), into.size());
    std::string name = name_of(number);
    GetItem item{name, {&part, 1}};
    auto sizes = client.get({&item, 1}, true);
    REQUIRE_MESSAGE(sizes.ok(), sizes.error().text);
    if ((*sizes)[0] == kMiss) return std::nullopt;
    return into;
}

uint64_t gauge(Server& server, const std::string& wanted) {
    for (auto& [name, value] : server.snapshot()) {
        if (name == wanted) return value;
    }
    FAIL("no gauge " << wanted);
    return 0;
}

template <class Condition>
void until(Condition condition) {
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
        REQUIRE(std::chrono::steady_clock::now() < deadline);
        std::this_thread::yield();
    }
}

}  // namespace

TEST_CASE(
    "ssd tier: puts go on while the disk stands still; what was not written in time is lost, and counted") {
    auto disk = fake_disk();
    auto server = make_server(disk);
    disk->hold();
    {
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 400; ++i) CHECK(put(client, i) == PutOutcome::kStored);  // three arenas
        CHECK(gauge(*server, "ssd_written_total") == 0);
        CHECK(gauge(*server, "ssd_lost_total") > 200);
        CHECK(get(client, 399) == content(399));
        CHECK(server->check_integrity());
        disk->release();
        until([&] {
            return gauge(*server, "ssd_dirty_objects") == 0 && gauge(*server, "ssd_writes_waiting") == 0;
        });
        CHECK(gauge(*server, "ssd_written_total") > 50);
        CHECK(server->check_integrity());
    }
}

TEST_CASE("ssd tier: others are served while one waits for the disk") {
    auto disk = fake_disk();
    {
        auto server = make_server(disk);
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 8; ++i) put(client, i);
    }
    auto server = make_server(disk);
    disk->hold(true);
    Client waits(dialing(*server)), other(dialing(*server));
    std::thread reader([&] { CHECK(get(waits, 3) == content(3)); });
    until([&] { return gauge(*server, "ssd_promoting") == 1; });
    CHECK(put(other, 100) == PutOutcome::kStored);
    CHECK(get(other, 100) == content(100));
    // A second reader of the same object waits for the same read; a removal meanwhile wins over both.
    std::thread second([&] {
        Client client(dialing(*server));
        CHECK(get(client, 5) == std::nullopt);
    });
    until([&] { return gauge(*server, "ssd_promoting") == 2; });
    std::string_view gone[] = {"k5"};
    REQUIRE(other.remove(gone));
    disk->release();
    reader.join();
    second.join();
    CHECK(server->check_integrity());
    CHECK(get(other, 5) == std::nullopt);
    CHECK(gauge(*server, "ssd_promoted_total") == 1);
}

TEST_CASE("ssd tier: a disk that fails is a miss, the node lives on") {
    auto disk = fake_disk();
    {
        auto server = make_server(disk);
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 20; ++i) put(client, i);
    }
    for (int error : {EIO, ENOSPC, EROFS}) {
        auto server = make_server(disk);
        Client client(dialing(*server));
        disk->fail([error](bool write, uint64_t, size_t) { return write || error == EIO ? error : 0; });
        CHECK(get(client, 3).has_value() == (error != EIO));
        uint64_t number = 1000 + static_cast<uint64_t>(error);
        CHECK(put(client, number) == PutOutcome::kStored);
        CHECK(get(client, number) == content(number));
        until([&] { return gauge(*server, "ssd_write_errors_total") > 0; });
        if (error != EIO) {
            until([&] { return gauge(*server, "ssd_read_only") == 1; });
            CHECK(server->ssd()[0].trouble.find("writing to /disk failed: ") == 0);
        }
        CHECK(server->check_integrity());
        server.reset();
        disk->fail({});
    }
}

TEST_CASE("ssd tier: a stop writes what memory alone has, though the disk is slow") {
    auto disk = fake_disk();
    auto server = make_server(disk, 0.0);
    {
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 20; ++i) put(client, i);
    }
    disk->hold();
    std::thread opens([&] {
        until([&] { return disk->waiting() != 0; });
        disk->release();
    });
    server->stop();
    opens.join();
    server.reset();
    server = make_server(disk);
    Client client(dialing(*server));
    for (uint64_t i = 0; i < 20; ++i) CHECK(get(client, i) == content(i));
}

TEST_CASE("ssd tier: the members of a group are written one behind the other") {
    auto disk = fake_disk();
    {
        auto server = make_server(disk, 0.0);  // nothing before the stop
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 40; ++i) put(client, i, false, i % 10 == 3 ? "page" : "");
    }
    std::vector<ptrdiff_t> places;
    for (uint64_t i : {3, 13, 23, 33}) {
        std::string begin = content(i).substr(0, 8);
        const auto* from = reinterpret_cast<const std::byte*>(begin.data());
        auto found = std::search(disk->image.begin(), disk->image.end(), from, from + begin.size());
        REQUIRE(found != disk->image.end());
        places.push_back(found - disk->image.begin());
    }
    std::ranges::sort(places);
    CHECK(places.back() - places.front() < 4 * static_cast<ptrdiff_t>(kObject + 8192));
    auto server = make_server(disk);
    Client client(dialing(*server));
    for (uint64_t i = 0; i < 40; ++i) CHECK(get(client, i) == content(i));
    CHECK(server->check_integrity());
}

TEST_CASE("ssd tier: a TCP client that leaves while it waits for the disk is noticed, unread frames or not") {
    auto disk = fake_disk();
    {
        auto server = make_server(disk);
        Client client(dialing(*server));
        for (uint64_t i = 0; i < 8; ++i) put(client, i);
    }
    for (bool unread : {false, true}) {
        auto server = make_server(disk);
        disk->hold(true);
        DialOptions options;
        options.address = server->addresses()[0];
        options.token = kToken;
        options.service = kServiceStore;
        auto dialed = dial(options);
        REQUIRE_MESSAGE(dialed.ok(), dialed.error().text);
        std::vector<std::byte> frames;
        size_t at = begin_frame(frames, Kind::kOpenSpace, 0, 1);
        Writer w(frames);
        w.text16("default");
        w.text16("");
        finish_frame(frames, at);
        at = begin_frame(frames, Kind::kRead, 0, 2);
        w.number(uint32_t{0});  // its space
        w.number(uint32_t{1});
        w.number(uint8_t{0});
        w.number(uint64_t{0});
        w.number(kObject);
        w.text16("k3");
        finish_frame(frames, at);
        int fd = dialed->fd.get();
        REQUIRE(::send(fd, frames.data(), frames.size(), MSG_NOSIGNAL) == std::ssize(frames));
        until([&] { return gauge(*server, "ssd_promoting") == 1; });
        if (unread) REQUIRE(::send(fd, frames.data(), frames.size(), MSG_NOSIGNAL) == std::ssize(frames));
        CHECK(gauge(*server, "connections") == 1);
        // Its answer to OPEN_SPACE, or the close would be a reset, which is told in any case.
        std::byte answer[sizeof(FrameHeader) + 4];
        REQUIRE(::recv(fd, answer, sizeof(answer), MSG_WAITALL) == std::ssize(answer));
        dialed->fd = Fd();
        until([&] { return gauge(*server, "connections") == 0; });
        CHECK(gauge(*server, "ssd_promoting") == 1);
        disk->release();
        until([&] { return gauge(*server, "ssd_promoting") == 0; });
        CHECK(server->check_integrity());
    }
}

TEST_CASE(
    "ssd tier: bytes of an object that was evicted while it was written do not come back after a new put") {
    auto disk = fake_disk();
    auto server = make_server(disk);
    Client client(dialing(*server));
    disk->hold();
    put(client, 1, false, "g");
    // The other of its group is never written: a group of which each is being written stays for so long.
    std::string large(1 << 20, 'x');
    MemoryRef large_part = MemoryRef::host(large.data(), large.size());
    PutItem large_item{"larger than a segment", {}, {&large_part, 1}, "g"};
    REQUIRE(client.put({&large_item, 1}, PutOptions{})->outcomes[0] == PutOutcome::kStored);
    until([&] { return gauge(*server, "ssd_writing") != 0; });
    // Its group goes, though one of it is being written.
    std::string_view name = "k1";
    auto there = [&] { return (*client.exists({&name, 1}))[0] == Presence::kHit; };
    for (uint64_t i = 100; there(); ++i) {
        REQUIRE(i < 5000);
        put(client, i);
    }
    std::string data(kObject, '!');
    MemoryRef part = MemoryRef::host(data.data(), data.size());
    PutItem item{name, {}, {&part, 1}};
    REQUIRE(client.put({&item, 1}, PutOptions{})->outcomes[0] == PutOutcome::kStored);
    CHECK(get(client, 1) == data);
    disk->release();
    // All that was begun before the new object has ended once that is written too.
    for (uint64_t i = 1000; i < 1400; ++i) {
        put(client, i);
        auto now = get(client, 1);
        CHECK((now == data || now == std::nullopt));
        if (now != data) break;
    }
    until([&] { return gauge(*server, "ssd_writing") == 0; });
    auto last = get(client, 1);
    CHECK((last == data || last == std::nullopt));
    CHECK(server->check_integrity());
}
