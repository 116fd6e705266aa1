// Master, agents and clients over real sockets, in one process.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../certificates.hpp"
#include "../drip.hpp"
#include "../random.hpp"
#include "directory/directory_client.hpp"
#include "directory/master_server.hpp"
#include "directory/member_agent.hpp"
#include "directory/protocol.hpp"
#include "server_bed.hpp"
#include "wire/dial.hpp"

namespace moonpool {
namespace {

using namespace testing;  // NOLINT: the bed is of these tests alone

TEST_CASE("master server: what a node holds is found, and no longer what it removed") {
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    DirectoryClient client(client_options(address));
    for (uint64_t n = 1; n <= 300; ++n) node.put(n);
    std::vector<Hash128> keys = hashes(1, 301);
    REQUIRE(until([&] { return hits(client, keys) == 300; }));
    for (uint64_t n = 100; n <= 110; ++n) node.remove(n);
    REQUIRE(until([&] { return hits(client, keys) == 289; }));
    LocateOptions prefix;
    prefix.prefix = true;
    prefix.width = 10;
    Result<LocateAnswer> answer = client.locate(keys, prefix);
    REQUIRE(answer);
    CHECK(answer->keys.size() == 90);
    Holder holder = answer->keys[0][0];
    REQUIRE(answer->members->find(holder.node) != nullptr);
    CHECK(answer->members->find(holder.node)->identity.name == "a");
    Result<std::vector<NodeId>> place = client.place(10, 2);
    REQUIRE(place);
    CHECK(*place == std::vector<NodeId>{holder.node});
    CHECK(client.place(10, 1, {{holder.node}, {}, false})->empty());
    CHECK(master->check_integrity());
}

TEST_CASE("master server: the same and more inside TLS, with little room for answers") {
    auto master = serve("127.0.0.1:0", [](MasterServerOptions& o) {
        o.limits.send_backlog_bytes = 1000;
        o.tls = testing::tls_server("master", true);
    });
    std::string address = master->addresses()[0];
    auto tls = testing::tls_client("authority", "", "caller");
    FakeNode a(address, "a", 1, tls);
    FakeNode b(address, "b", 2, tls);
    FakeNode plain(address, "plain", 3);
    DirectoryClientOptions options = client_options(address);
    options.tls = tls;
    DirectoryClient client(options);
    for (uint64_t n = 0; n < 20000; ++n) a.put(n);
    b.put(99999);
    std::vector<Hash128> keys = hashes(0, 100000);
    REQUIRE(until([&] { return hits(client, keys) == 20001; }));
    for (uint64_t n = 0; n < 50; ++n) a.remove(n);
    REQUIRE(until([&] { return hits(client, keys) == 19951; }));
    CHECK(client.members(true).value()->rows.size() == 2);
    REQUIRE(until([&] {
        return plain.agent().state().why_not.find("this port speaks TLS only") != std::string::npos;
    }));

    DirectoryClient in_plain(client_options(address));
    Result<LocateAnswer> refused = in_plain.locate(keys);
    REQUIRE(!refused.ok());
    CHECK(refused.error().text.find("this port speaks TLS only") != std::string::npos);

    // Ends while others wait, in whatever state.
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            for (;;) {
                Result<LocateAnswer> answer = client.locate(keys);
                if (!answer && answer.error().code == Code::kClosed) return;
            }
        });
    }
    master->stop();
    REQUIRE(until([&] { return !client.connected(); }));
    client.close();
    for (std::thread& thread : threads) thread.join();
}

TEST_CASE("master server: many frames' worth of keys in one call") {
    auto master = serve("127.0.0.1:0", [](MasterServerOptions& o) { o.limits.send_backlog_bytes = 1000; });
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    DirectoryClient client(client_options(address));
    node.put(3);
    node.put(99999);
    std::vector<Hash128> keys = hashes(0, 100000);
    REQUIRE(until([&] { return hits(client, keys) == 2; }));
    LocateOptions prefix;
    prefix.prefix = true;
    CHECK(client.locate(std::span(keys).subspan(3), prefix)->keys.size() == 1);
    CHECK(client.locate(std::span(keys).subspan(99999), prefix)->keys.size() == 1);
    CHECK(client.locate(keys)->keys.size() == 100000);
    CHECK(client.locate({})->keys.size() == 0);
    CHECK(*client.forget(keys) == 0);
}

TEST_CASE("master server: one byte now and then keeps no place, in a frame and before a node has joined") {
    auto master = serve("127.0.0.1:0", [](MasterServerOptions& o) {
        o.limits.stalled_frame_ms = 300;
        o.limits.handshake_ms = 1500;
    });
    DialOptions options;
    options.address = master->addresses()[0];
    options.token = kToken;
    options.timeout_ms = 10000;
    auto begun = [](Kind kind) {
        std::vector<std::byte> out;
        size_t at = begin_frame(out, kind, 0, 1);
        out.resize(out.size() + 100000);
        finish_frame(out, at);
        return out;
    };
    for (auto [service, kind] :
         {std::pair{kServiceDirectory, Kind::kLocate}, std::pair{kServiceMember, Kind::kJoin}}) {
        options.service = service;
        Result<Dialed> dialed = dial(options);
        REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
        CHECK(drip(dialed->fd.get(), begun(kind)) != 0);
    }
    options.service = kServiceDirectory;
    Result<Dialed> idle = dial(options);
    REQUIRE(idle.ok());
    pollfd over{idle->fd.get(), POLLIN, 0};
    CHECK(::poll(&over, 1, 1500) == 0);
}

TEST_CASE("master server: a new master hears everything again, and calls fail at once meanwhile") {
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode a(address, "a"), b(address, "b");
    DirectoryClient client(client_options(address));
    for (uint64_t n = 1; n <= 500; ++n) a.put(n);
    for (uint64_t n = 400; n <= 800; ++n) b.put(n);
    std::vector<Hash128> keys = hashes(1, 801);
    REQUIRE(until([&] { return hits(client, keys) == 800; }));
    REQUIRE(client.members());
    master.reset();
    CHECK_FALSE(client.locate(keys));
    auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) CHECK(client.locate(keys).error().code == Code::kUnavailable);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    CHECK(client.members());  // as it was last known
    CHECK_FALSE(client.members(true));
    for (uint64_t n = 801; n <= 900; ++n) a.put(n);  // it goes on without a master
    master = serve(address);
    keys = hashes(1, 901);
    start = std::chrono::steady_clock::now();
    REQUIRE(until([&] { return hits(client, keys) == 900; }));
    MESSAGE("found again after "
            << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() << " s");
    CHECK(master->check_integrity());
}

TEST_CASE("master server: a node whose log overflowed tells its inventory anew") {
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    REQUIRE(until([&] { return node.agent().state().joined; }));
    DirectoryClient client(client_options(address));
    for (uint64_t n = 1; n <= 5000; ++n) node.put(n);
    for (uint64_t n = 1; n <= 5000; n += 2) node.remove(n);
    std::vector<Hash128> keys = hashes(1, 5001);
    REQUIRE(until([&] { return hits(client, keys) == 2500; }));
}

TEST_CASE("master server: one name is one node; a new life waits until the old one is silent") {
    auto master = serve();
    std::string address = master->addresses()[0];
    auto old_life = std::make_unique<FakeNode>(address, "a", 1);
    REQUIRE(until([&] { return old_life->agent().state().joined; }));
    FakeNode new_life(address, "a", 2);
    REQUIRE(until([&] {
        return new_life.agent().state().why_not.find("give each node of a host a name") != std::string::npos;
    }));
    CHECK(old_life->agent().state().joined);
    old_life.reset();
    REQUIRE(until([&] { return new_life.agent().state().joined; }));
    CHECK(master->nodes().rows.size() == 2);  // one current, one of the past
}

TEST_CASE("master server: copies removed while a node was away are dropped when it is back") {
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode stayed(address, "b");
    DirectoryClient client(client_options(address));
    auto keys = hashes(1, 4);
    FakeNode node(address, "a");
    for (uint64_t n = 1; n <= 3; ++n) node.put(n);
    REQUIRE(until([&] { return hits(client, keys) == 3; }));
    node.agent().stop();
    REQUIRE(until([&] { return hits(client, keys) == 0; }));  // it has left
    CHECK(*client.forget(std::span(keys).first(2)) == 0);
    REQUIRE(node.agent().start());
    REQUIRE(until([&] { return hits(client, keys) == 1; }));
    REQUIRE(until([&] { return node.size() == 1; }));
    CHECK(master->check_integrity());
}

TEST_CASE("master server: a connection may ask only what is its own, and nonsense ends it alone") {
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    REQUIRE(until([&] { return node.agent().state().joined; }));
    DialOptions dial_options;
    dial_options.address = address;
    dial_options.token = kToken;
    struct Bad {
        std::string_view service;
        Kind kind;
        std::vector<std::byte> body;
    };
    std::vector<std::byte> zeros(64), short_locate(8);
    short_locate[4] = std::byte{9};  // nine hashes that do not follow
    std::vector<Bad> bad = {
        {kServiceDirectory, Kind::kJoin, zeros},    {kServiceDirectory, Kind::kDelta, zeros},
        {kServiceMember, Kind::kLocate, zeros},     {kServiceMember, Kind::kDelta, zeros},
        {kServiceMember, Kind::kBeat, zeros},       {kServiceMember, Kind::kJoin, zeros},
        {kServiceDirectory, Kind::kLocate, zeros},  {kServiceDirectory, Kind::kLocate, short_locate},
        {kServiceDirectory, Kind::kForget, zeros},  {kServiceDirectory, Kind::kOrdered, zeros},
        {kServiceMember, Kind::kRemovals, zeros},   {kServiceDirectory, Kind::kMembers, {}},
        {kServiceDirectory, Kind::kWelcome, zeros}, {kServiceDirectory, Kind::kPlace, {}}};
    for (const Bad& b : bad) {
        CAPTURE(static_cast<int>(b.kind));
        dial_options.service = b.service;
        Result<Dialed> dialed = dial(dial_options);
        REQUIRE(dialed);
        std::vector<std::byte> frame;
        size_t at = begin_frame(frame, b.kind, 0, 1);
        Writer(frame).bytes(b.body.data(), b.body.size());
        finish_frame(frame, at);
        REQUIRE(::send(dialed->fd.get(), frame.data(), frame.size(), MSG_NOSIGNAL) ==
                static_cast<ssize_t>(frame.size()));
        FrameHeader header;
        REQUIRE(::recv(dialed->fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
        CHECK(header.kind == Kind::kError);
        CHECK(header.request_id == 0);
        std::vector<std::byte> body(header.length);
        REQUIRE(::recv(dialed->fd.get(), body.data(), body.size(), MSG_WAITALL) ==
                static_cast<ssize_t>(body.size()));
        CHECK(::recv(dialed->fd.get(), body.data(), 1, 0) <= 0);
    }
    CHECK(node.agent().state().joined);
    CHECK(master->check_integrity());
}

// Frames of every kind, changed at random, from both sides: the master answers or hangs up, and stays sound.
TEST_CASE("master server: mutated frames") {
    testing::Random random(5);
    auto master = serve();
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    node.put(1);
    DirectoryClient client(client_options(address));
    auto keys = hashes(1, 2);
    REQUIRE(until([&] { return hits(client, keys) == 1; }));
    NodeIdentity who;
    who.name = "mutant";
    NodeLoad load;
    load.tenants.push_back({"default", 1, 1, 1, 1});
    auto body = [&](Kind kind) {
        std::vector<std::byte> out;
        Writer w(out);
        switch (kind) {
            case Kind::kJoin:
                write_identity(w, who);
                write_load(w, load);
                write_event_endpoints(w, who);
                w.number(uint64_t{5});
                break;
            case Kind::kDelta:
                w.number(uint32_t{3});
                w.number(uint32_t{2});
                for (uint64_t n : {7, 8}) write_row(w, {hash_of(n), Tier::kDram, true});
                break;
            case Kind::kBeat:
                w.number(uint64_t{0});
                write_load(w, load);
                break;
            case Kind::kPlace:
                w.number(uint64_t{1});
                for (uint16_t n : {1, 0, 1, 1, 0, 1}) w.number(n);
                w.number(char{'h'});
                break;
            case Kind::kForget:
                w.number(uint32_t{1});
                w.number(uint32_t{1});
                w.number(uint16_t{0});
                write_hash(w, hash_of(9));
                break;
            case Kind::kRemovals:
                w.number(uint64_t{0});
                w.number(uint32_t{1});
                write_hash(w, hash_of(9));
                w.number(uint64_t{77});
                break;
            case Kind::kOrdered: {
                OrderDone done{{hash_of(9)}, {first_version(5)}, 1, {{0}}, {{1}}};
                OrderedFrame(done, 0, 1).write(w);
                break;
            }
            case Kind::kLocate:
                w.number(uint32_t{random.below(8) != 0 ? 0u : uint32_t{kLocateOrder}} | uint32_t{1} << 16);
                w.number(uint32_t{1});
                write_hash(w, hash_of(9));  // an order removes it
                break;
            default:
                w.number(uint64_t{0});
        }
        return out;
    };
    constexpr Kind kOfMember[] = {Kind::kJoin, Kind::kDelta, Kind::kBeat, Kind::kRemovals};
    constexpr Kind kOfClient[] = {Kind::kMembers, Kind::kLocate, Kind::kPlace, Kind::kForget, Kind::kOrdered};
    DialOptions dial_options;
    dial_options.address = address;
    dial_options.token = kToken;
    for (int round = 0; round < 150; ++round) {
        bool member = random.one_in(2);
        dial_options.service = member ? kServiceMember : kServiceDirectory;
        Result<Dialed> dialed = dial(dial_options);
        REQUIRE(dialed);
        std::vector<std::byte> bytes;
        for (int i = 0; i < 8; ++i) {
            Kind kind = member ? kOfMember[i == 0 ? 0 : random.below(4)] : kOfClient[random.below(5)];
            std::vector<std::byte> b = body(kind);
            if (random.one_in(3)) b[random.below(b.size())] = static_cast<std::byte>(random.below(256));
            if (random.one_in(6)) b.resize(random.below(b.size() + 1));
            size_t at = begin_frame(bytes, kind, 0, static_cast<uint64_t>(i));
            Writer(bytes).bytes(b.data(), b.size());
            finish_frame(bytes, at);
        }
        if (random.one_in(4)) bytes[random.below(bytes.size())] = static_cast<std::byte>(random.below(256));
        (void)!::send(dialed->fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        ::shutdown(dialed->fd.get(), SHUT_WR);
        std::byte answers[4096];
        while (::recv(dialed->fd.get(), answers, sizeof(answers), 0) > 0) {
        }
        if (round % 10 == 0) REQUIRE(master->check_integrity());
    }
    // Not read while the master may have to hear of removals from a node that seems to know more of them.
    REQUIRE(until([&] { return hits(client, keys) == 1; }));
    CHECK(master->check_integrity());
}

uint64_t limits_raised(MasterServer& master) {
    for (auto& [name, value] : master.snapshot()) {
        if (name == "limits_raised_total") return value;
    }
    return UINT64_MAX;
}

TEST_CASE("master server: limits of connections, and clients from many threads") {
    auto memory = std::make_shared<std::atomic<uint64_t>>(0);
    auto master = serve("127.0.0.1:0", [memory](MasterServerOptions& o) {
        o.clients_max = 8;
        o.available_memory = [memory] { return memory->load(); };
    });
    std::string address = master->addresses()[0];
    FakeNode node(address, "a");
    for (uint64_t n = 1; n <= 50; ++n) node.put(n);
    std::vector<Hash128> keys = hashes(1, 51);
    DirectoryClient shared(client_options(address));
    REQUIRE(until([&] { return hits(shared, keys) == 50; }));
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            DirectoryClient own(client_options(address));
            for (int i = 0; i < 50; ++i) {
                wrong += hits(shared, keys) != 50;
                wrong += hits(own, keys) != 50;
                wrong += !own.members(true);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    std::vector<std::unique_ptr<DirectoryClient>> crowd;
    int refused = 0;
    for (int i = 0; i < 12; ++i) {
        crowd.push_back(std::make_unique<DirectoryClient>(client_options(address)));
        Result<std::shared_ptr<const Members>> members = crowd.back()->members();
        if (members) continue;
        ++refused;
        CHECK(members.error().text.find("available memory") != std::string::npos);
    }
    CHECK(refused >= 4);
    // With more memory the limit gives way, and the log and the metrics say so.
    *memory = 64 << 20;
    CHECK(limits_raised(*master) == 0);
    crowd.clear();
    for (int i = 0; i < 12; ++i) {
        crowd.push_back(std::make_unique<DirectoryClient>(client_options(address)));
        CHECK(crowd.back()->members());
    }
    CHECK(limits_raised(*master) == 1);
    auto notes = master->journal().take();
    CHECK(std::ranges::count(notes, "limit_raised", &Note::kind) == 1);
    CHECK(hits(shared, keys) == 50);
    shared.close();
    CHECK(shared.locate(keys).error().code == Code::kClosed);
}

}  // namespace
}  // namespace moonpool
