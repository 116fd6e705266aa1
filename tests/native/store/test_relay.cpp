// The relay over real sockets, in one process: a master, a node, and clients of that node.
#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "../directory/server_bed.hpp"
#include "directory/pool_directory.hpp"
#include "directory/questions.hpp"
#include "store/client/node_client.hpp"
#include "store/node/server.hpp"
#include "wire/dial.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

std::unique_ptr<Server> make_node(const std::string& master, const char* tenant = "default",
                                  const std::function<void(ServerOptions&)>& change = {}) {
    ServerOptions options;
    options.token = kToken;
    for (std::string each : {std::string("default"), std::string(tenant)}) {
        if (!options.pools.empty() && options.pools[0].tenant == each) continue;
        PoolOptions pool;
        pool.tenant = each;
        pool.arena_bytes = 4 << 20;
        options.pools.push_back(pool);
    }
    options.cluster.master = master;
    options.cluster.name = "a";
    options.cluster.host_id = "h-a";
    options.cluster.address = "127.0.0.1:7710";
    options.cluster.clients_timeout_ms = 2000;  // sanitizers on a busy machine
    options.cluster.relay = "always";
    if (change) change(options);
    auto server = Server::create(std::move(options));
    REQUIRE(server);
    REQUIRE((*server)->start());
    return std::move(*server);
}

DirectoryClientOptions by(Server& node, const std::string& master, const char* tenant = "default") {
    DirectoryClientOptions options;
    options.master = master;
    options.token = kToken;
    options.tenant = tenant;
    options.timeout_ms = 4000;
    options.members_ms = 0;
    options.back_to_node_ms = 200;
    options.relay = {"the node", [&node] { return node.dial(); }, [] { return true; }};
    return options;
}

uint64_t gauge(const std::vector<std::pair<std::string, uint64_t>>& rows, const std::string& wanted) {
    for (auto& [name, value] : rows) {
        if (name == wanted) return value;
    }
    return UINT64_MAX;
}

std::unique_ptr<DirectoryClient> in_touch(Server& node, const std::string& master) {
    auto client = std::make_unique<DirectoryClient>(by(node, master));
    REQUIRE(until([&] { return client->members(true).ok(); }));
    return client;
}

// What the node's relay says to a caller that frames its questions itself.
Result<Dialed> raw(Server& node) {
    DialOptions to;
    to.address = "the node";
    to.token = kToken;
    to.service = kServiceDirectory;
    to.timeout_ms = 4000;
    to.connect = [&node] { return node.dial(); };
    return dial(to);
}

void send_all(const Fd& fd, std::span<const std::byte> bytes) {
    REQUIRE(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

std::pair<FrameHeader, std::vector<std::byte>> receive(const Fd& fd) {
    FrameHeader header;
    REQUIRE(::recv(fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
    std::vector<std::byte> body(header.length);
    if (header.length != 0) {
        REQUIRE(::recv(fd.get(), body.data(), body.size(), MSG_WAITALL) == static_cast<ssize_t>(body.size()));
    }
    return {header, std::move(body)};
}

void write_members(std::vector<std::byte>& out, uint64_t id) {
    size_t at = begin_frame(out, Kind::kRelay, 0, id);
    Writer w(out);
    RelayHead{2000, Kind::kMembers}.write(w);
    w.number(uint64_t{0});
    finish_frame(out, at);
}

}  // namespace

// A node of a later release, whose master takes version 2 alone: one handshake, at the other end of a socket.
void greet_as_later(Fd fd, std::atomic<int>& callers) {
    const Nonce nonce = random_nonce();
    const Incarnation life = random_incarnation();
    std::vector<std::byte> out;
    size_t at = begin_handshake_frame(out, Kind::kChallenge, 0, {1, 2});
    Writer(out).bytes(nonce.data(), nonce.size());
    Writer(out).bytes(life.data(), life.size());
    finish_frame(out, at);
    send_all(fd, out);
    auto [auth, body] = receive(fd);
    Reader r(body);
    const std::string tenant(r.text16());
    Nonce theirs;
    std::memcpy(theirs.data(), r.bytes(theirs.size()).data(), theirs.size());
    const Mac proof = handshake_mac(Role::kNode, kToken, nonce, theirs, life,
                                    mac_tenant(tenant, kServiceDirectory), auth.version);
    out.clear();
    at = begin_frame(out, Kind::kWelcome, kFlagAnswer, auth.request_id);
    Writer w(out);
    w.number_at(at + offsetof(FrameHeader, lowest), uint16_t{2});
    w.number_at(at + offsetof(FrameHeader, highest), uint16_t{2});
    w.bytes(proof.data(), proof.size());
    w.number(uint64_t{0});
    finish_frame(out, at);
    send_all(fd, out);
    ++callers;
}

TEST_CASE("a process that does not speak the version in which its node asks the master asks it itself") {
    auto master = serve();
    std::atomic<int> callers{0};
    std::vector<std::thread> nodes;
    {
        DirectoryClientOptions options;
        options.master = master->addresses().front();
        options.token = kToken;
        options.timeout_ms = 4000;
        options.members_ms = 0;
        auto connect = [&]() -> Result<Fd> {
            int ends[2];
            if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
                return os_error("socketpair");
            nodes.emplace_back(
                [fd = std::make_shared<Fd>(ends[0]), &callers] { greet_as_later(std::move(*fd), callers); });
            return Fd(ends[1]);
        };
        options.relay = {"the node", connect, [] { return true; }};
        DirectoryClient client(options);
        CHECK(client.members(true).ok());
        CHECK(gauge(master->snapshot(), "connections_clients") == 1);
    }
    for (std::thread& node : nodes) node.join();
    CHECK(callers == 1);
}

TEST_CASE("a node says in which version it asks the master") {
    auto master = serve();
    auto node = make_node(master->addresses().front());
    REQUIRE(until([&] { return raw(*node).ok(); }));
    Result<Dialed> dialed = raw(*node);
    REQUIRE(dialed.ok());
    CHECK(dialed->version == kVersion);
}

TEST_CASE("processes of a node ask the master over one connection, each what it wants to know") {
    auto master = serve();
    const std::string at = master->addresses().front();
    auto node = make_node(at);
    FakeNode other(at, "b", 2);
    for (uint64_t n = 0; n < 1000; ++n) other.put(n);
    REQUIRE(until([&] { return gauge(master->snapshot(), "directory_rows") == 1000; }));
    std::vector<std::unique_ptr<DirectoryClient>> clients;
    for (int i = 0; i < 8; ++i) clients.push_back(in_touch(*node, at));
    CHECK(gauge(master->snapshot(), "connections_clients") == 1);
    CHECK(gauge(node->snapshot(), "relay_connections") == 8);
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (size_t i = 0; i < clients.size(); ++i) {
        threads.emplace_back([&, i] {
            for (uint64_t round = 0; round < 50; ++round) {
                // Another number of keys than the others ask for, some of which no node has.
                uint64_t begin = 1000 - 10 * i;
                auto located = clients[i]->locate(hashes(begin, begin + 100));
                if (!located || located->keys.size() != 100) {
                    ++wrong;
                    continue;
                }
                for (uint64_t k = 0; k < 100; ++k) wrong += (*located).keys[k].size() != (begin + k < 1000);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    auto placed = clients[0]->place(1, 2);
    REQUIRE(placed);
    CHECK(!placed->empty());
    // More keys than one frame has, so that several are under way.
    auto many = clients[1]->locate(hashes(0, 100000));
    REQUIRE(many);
    CHECK(many->keys.size() == 100000);
    auto ordered = clients[2]->order(hashes(0, 3), nullptr);
    REQUIRE(ordered);
    REQUIRE(ordered->versions.size() == 3);
    OrderDone done{hashes(0, 3), ordered->versions, ordered->epoch, {{}, {}, {}}, {{}, {}, {}}};
    auto last = clients[2]->ordered(done);
    REQUIRE(last);
    CHECK(*last == ordered->versions);
    REQUIRE(clients[3]->forget(hashes(5, 6)));
    for (auto& client : clients) CHECK(client->by_node());
    clients.clear();
    CHECK(until([&] { return gauge(node->snapshot(), "relay_connections") == 0; }));
    CHECK(gauge(master->snapshot(), "connections_clients") == 1);
}

TEST_CASE("processes read the members in their node's memory, and ask for one look at the master together") {
    auto master = serve();
    const std::string at = master->addresses().front();
    auto node = make_node(at);
    FakeNode other(at, "b", 2);
    std::vector<std::unique_ptr<DirectoryClient>> clients;
    for (int i = 0; i < 8; ++i) {
        DirectoryClientOptions options = by(*node, at);
        options.members_ms = 3600 * 1000;
        clients.push_back(std::make_unique<DirectoryClient>(options));
    }
    // The first asks; the others find what it was told.
    REQUIRE(until([&] {
        auto members = clients[0]->members(true);
        return members && (*members)->rows.size() == 2 &&
               std::ranges::all_of((*members)->rows,
                                   [](const Member& row) { return row.state == MemberState::kAlive; });
    }));
    const uint64_t asked = gauge(node->snapshot(), "relay_members_total");
    CHECK(asked >= 1);
    for (auto& client : clients) REQUIRE(until([&] { return client->locate(hashes(0, 1)).ok(); }));
    for (auto& client : clients) {
        auto members = client->members();
        REQUIRE(members);
        CHECK((*members)->rows.size() == 2);
        CHECK((*members)->rows == (*clients[0]->members())->rows);
    }
    CHECK(gauge(node->snapshot(), "relay_members_total") == asked);
    // A change: a lookup shows it to each, for it has a later epoch, with no more looks than processes.
    FakeNode third(at, "c", 3);
    REQUIRE(until([&] { return gauge(master->snapshot(), "nodes_alive") == 3; }));
    for (auto& client : clients) {
        auto located = client->locate(hashes(0, 1));
        REQUIRE(located);
        CHECK(located->members->rows.size() == 3);
    }
    CHECK(gauge(node->snapshot(), "relay_members_total") <= asked + clients.size());
    // Many that insist on the master's word at once, while members come and go.
    std::atomic<uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (auto& client : clients) {
        threads.emplace_back([&wrong, &client] {
            uint64_t epoch = 0;
            for (int i = 0; i < 100; ++i) {
                auto members = client->members(true);
                if (!members || (*members)->epoch < epoch || (*members)->rows.size() < 3) ++wrong;
                if (members) epoch = (*members)->epoch;
            }
        });
    }
    for (uint8_t life = 4; life < 8; ++life) FakeNode passing(at, "passing" + std::to_string(life), life);
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
}

TEST_CASE("each tenant of a node has a connection of its own to the master") {
    auto master = serve();
    auto node = make_node(master->addresses().front(), "other");
    auto one = in_touch(*node, master->addresses().front());
    DirectoryClient two(by(*node, master->addresses().front(), "other"));
    REQUIRE(until([&] { return two.members(true).ok(); }));
    CHECK(gauge(master->snapshot(), "connections_clients") == 2);
    CHECK(two.by_node());
    // The node has no such tenant: the master is asked for it as before.
    DirectoryClient third(by(*node, master->addresses().front(), "third"));
    REQUIRE(until([&] { return third.members(true).ok(); }));
    CHECK(!third.by_node());
}

TEST_CASE("a node that is told not to relay says so, and refuses") {
    auto master = serve();
    auto node = make_node(master->addresses().front(), "default",
                          [](ServerOptions& o) { o.cluster.relay = "never"; });
    CHECK(!raw(*node));
    DirectoryClient client(by(*node, master->addresses().front()));
    REQUIRE(until([&] { return client.members(true).ok(); }));
    CHECK(!client.by_node());
}

TEST_CASE("a node has the processes of its host ask by it where the pool is large") {
    for (bool large : {true, false}) {
        // Of five beats a second more than one is the most that the master answers: as with 2,000 nodes.
        auto master = serve("127.0.0.1:0", [large](MasterServerOptions& o) {
            if (large) o.master.pace.answers_per_s_max = 1;
        });
        auto node = make_node(master->addresses().front(), "default",
                              [](ServerOptions& o) { o.cluster.relay = "auto"; });
        ClientOptions options;
        options.token = kToken;
        options.timeout_ms = 20000;  // sanitizers on a busy machine
        options.dial = [&node] { return node->dial(); };
        NodeClient client(std::move(options));
        REQUIRE(client.session().ok());
        if (large) {
            CHECK(until([&] { return client.relays(); }));
        } else {
            REQUIRE(until([&] { return gauge(node->snapshot(), "master_beats_total") > 3; }));
            CHECK(!client.relays());
        }
    }
}

TEST_CASE("while the master is away processes are told at once, and all are back by the node when it is") {
    auto master = serve();
    const std::string at = master->addresses().front();
    auto node = make_node(at);
    auto one = in_touch(*node, at), two = in_touch(*node, at);
    master->stop();
    master.reset();
    CHECK(until([&] { return !one->members(true).ok(); }));
    auto before = std::chrono::steady_clock::now();
    auto refused = two->members(true);
    CHECK(!refused);
    CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(2));
    CHECK(refused.error().text.find(at) != std::string::npos);
    CHECK(two->members().ok());  // the last ones that it heard of
    master = serve(at);
    CHECK(until([&] { return one->members(true).ok() && two->members(true).ok(); }));
    CHECK(one->by_node());
    CHECK(two->by_node());
    CHECK(gauge(master->snapshot(), "connections_clients") == 1);
}

TEST_CASE("a node that says nothing keeps no process from the master, and is tried again") {
    auto master = serve();
    auto node = make_node(master->addresses().front());
    DirectoryClientOptions options = by(*node, master->addresses().front());
    options.timeout_ms = 300;
    std::atomic<bool> silent{true}, answers{true};
    std::atomic<int> tried{0};
    Fd held[64];
    options.relay.connect = [&]() -> Result<Fd> {
        ++tried;
        if (!silent) return node->dial();
        int pair[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        held[tried % 64] = Fd(pair[0]);
        return Fd(pair[1]);
    };
    options.relay.answers = [&] { return answers.load(); };
    DirectoryClient client(options);
    CHECK(until([&] { return client.members(true).ok(); }));
    CHECK(!client.by_node());
    CHECK(tried >= 1);
    silent = false;
    CHECK(until([&] { return client.members(true).ok() && client.by_node(); }));
    // Known not to answer: the next call asks the master itself, and does not fail.
    answers = false;
    CHECK(client.members(true).ok());
    CHECK(!client.by_node());
    answers = true;
    CHECK(until([&] { return client.members(true).ok() && client.by_node(); }));
}

TEST_CASE("a node that ends while it is asked is noticed by no caller") {
    auto master = serve();
    auto node = make_node(master->addresses().front());
    auto client = in_touch(*node, master->addresses().front());
    std::atomic<bool> gone{false};
    DirectoryClientOptions options = by(*node, master->addresses().front());
    options.relay.connect = [&]() -> Result<Fd> {
        if (gone) return Error{Code::kUnavailable, "no node"};
        return node->dial();
    };
    DirectoryClient other(options);
    REQUIRE(until([&] { return other.members(true).ok(); }));
    REQUIRE(other.by_node());
    gone = true;
    node->stop();
    CHECK(other.members(true).ok());
    CHECK(!other.by_node());
}

TEST_CASE("what breaks the form ends its own connection and no other") {
    auto master = serve();
    auto node = make_node(master->addresses().front());
    auto client = in_touch(*node, master->addresses().front());
    auto build = [](Kind outer, Kind inner, size_t bytes) {
        std::vector<std::byte> out;
        size_t at = begin_frame(out, outer, 0, 1);
        Writer w(out);
        RelayHead{1000, inner}.write(w);
        for (size_t i = 0; i < bytes; ++i) w.number(uint8_t{0xFF});
        finish_frame(out, at);
        return out;
    };
    std::vector<std::vector<std::byte>> bad = {
        build(Kind::kRelay, Kind::kLocate, 8),   build(Kind::kRelay, Kind::kJoin, 64),
        build(Kind::kRelay, Kind::kMembers, 3),  build(Kind::kMembers, Kind::kMembers, 8),
        build(Kind::kRelay, Kind::kOrdered, 24), std::vector<std::byte>(24, std::byte{0x55})};
    for (const auto& bytes : bad) {
        Result<Dialed> dialed = raw(*node);
        REQUIRE(dialed);
        send_all(dialed->fd, bytes);
        auto [header, body] = receive(dialed->fd);
        CHECK(header.kind == Kind::kError);
        CHECK(header.request_id == 0);
        char byte;
        CHECK(::recv(dialed->fd.get(), &byte, 1, 0) == 0);
        CHECK(client->members(true).ok());
    }
    CHECK(gauge(node->snapshot(), "relay_master_lost_total") == 0);
}

TEST_CASE("a process that asks too much at once is refused those, and answered the others") {
    auto master = serve();
    auto node = make_node(master->addresses().front());
    auto client = in_touch(*node, master->addresses().front());
    Result<Dialed> dialed = raw(*node);
    REQUIRE(dialed);
    constexpr uint64_t kAsked = 80, kOpen = RelayLimits{}.client_questions;
    std::vector<std::byte> out;
    for (uint64_t id = 1; id <= kAsked; ++id) write_members(out, id);
    send_all(dialed->fd, out);
    uint64_t answered = 0, refused = 0;
    for (uint64_t i = 0; i < kAsked; ++i) {
        auto [header, body] = receive(dialed->fd);
        REQUIRE(header.request_id != 0);
        (header.kind == Kind::kError ? refused : answered) += 1;
    }
    CHECK(answered >= kOpen);
    CHECK(answered + refused == kAsked);
    CHECK(gauge(node->snapshot(), "relay_refused_total") == refused);
    CHECK(refused > 0);
    // And then it goes on.
    out.clear();
    write_members(out, 1000);
    send_all(dialed->fd, out);
    CHECK(receive(dialed->fd).first.kind == Kind::kMembers);
    CHECK(client->members(true).ok());
}

TEST_CASE("the node relays to the masters of several ranges, over one connection to each") {
    auto of_range = [](uint32_t index) {
        return serve("127.0.0.1:0", [&](MasterServerOptions& o) { o.range = {index, 2}; });
    };
    std::unique_ptr<MasterServer> masters[2] = {of_range(0), of_range(1)};
    const std::string at[2] = {masters[0]->addresses().front(), masters[1]->addresses().front()};
    auto node = make_node(at[0] + ";" + at[1]);
    FakeNode others[2] = {{at[0], "b", 2, nullptr, Range{0, 2}}, {at[1], "b", 2, nullptr, Range{1, 2}}};
    for (FakeNode& other : others) {
        for (uint64_t n = 0; n < 100; ++n) other.put(n);
    }
    const std::vector<Hash128> keys = hashes(0, 110);
    auto holders = [&](PoolDirectory& client) {
        Result<LocateAnswer> located = client.locate(keys);
        size_t n = 0;
        for (size_t i = 0; located && i < located->keys.size(); ++i) n += located->keys[i].size();
        return n;
    };
    std::vector<std::unique_ptr<PoolDirectory>> clients;
    for (int i = 0; i < 3; ++i) {
        clients.push_back(std::make_unique<PoolDirectory>(by(*node, at[0] + ";" + at[1])));
        CHECK(until([&] { return holders(*clients.back()) == 100; }));
    }
    for (auto& master : masters) CHECK(gauge(master->snapshot(), "connections_clients") == 1);
    CHECK(gauge(node->snapshot(), "relay_connections") == 6);
    CHECK(gauge(node->snapshot(), "relay_masters_connected") == 2);
    CHECK(clients[0]->members(true).value()->rows.size() == 2);
    // What one range's master orders is known by its own connection.
    const Hash128 one = keys[0];
    auto order = clients[1]->order({&one, 1}, nullptr);
    REQUIRE(order);
    CHECK(order->versions.size() == 1);
    // One master ends: its range alone is unknown, and the other's connection stays.
    masters[1]->stop();
    CHECK(until([&] {
        auto located = clients[0]->locate(keys);
        return located && located->unreached.contains(1);
    }));
    CHECK(gauge(masters[0]->snapshot(), "connections_clients") == 1);
    masters[1] = serve(at[1], [&](MasterServerOptions& o) { o.range = {1, 2}; });
    CHECK(until([&] { return holders(*clients[2]) == 100; }));
    // A process with another list of masters is told so, and asks them itself.
    DialOptions to;
    to.address = "the node";
    to.token = kToken;
    to.service = relayed_service(kServiceDirectory, {0, 4});
    to.timeout_ms = 4000;
    to.connect = [&node] { return node->dial(); };
    Result<Dialed> refused = dial(to);
    REQUIRE(!refused);
    CHECK(refused.error().text.find("has 2 ranges, and the caller asks for range 0/4") != std::string::npos);
}
