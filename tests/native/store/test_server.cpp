// Server and clients in one process, over dial() and over a socket path, with several threads at once.
//
// Each writer and each reader is a Client of its own, or shares one with threads that do the same: two
// threads that read and write the same mapping of the arena are ordered by the node's answers in between,
// which ThreadSanitizer cannot see.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "../random.hpp"
#include "store/client/client.hpp"
#include "store/node/server.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

constexpr const char* kToken = "a token";

std::unique_ptr<Server> make_server(uint64_t bytes, std::string path = {}, Limits limits = {}) {
    ServerOptions options;
    options.socket_path = std::move(path);
    options.token = kToken;
    PoolOptions pool;
    pool.arena_bytes = bytes;
    options.pools = {pool};
    options.limits = limits;
    auto server = Server::create(std::move(options));
    REQUIRE(server);
    REQUIRE((*server)->start());
    return std::move(*server);
}

ClientOptions dialing(Server& server) {
    ClientOptions options;
    options.dial = [&server] { return server.dial(); };
    options.token = kToken;
    options.timeout_ms = 20000;  // sanitizers on a busy machine
    return options;
}

PutOutcome put(Client& client, std::string_view name, std::string_view data, bool replace = false,
               std::string_view parent = {}, bool ack = true) {
    MemoryRef part = MemoryRef::host(data.data(), data.size());
    PutItem item{name, parent, {&part, 1}};
    auto report = client.put({&item, 1}, PutOptions{replace, ack});
    REQUIRE_MESSAGE(report.ok(), report.error().text);
    return report->outcomes[0];
}

std::optional<std::string> get(Client& client, std::string_view name, bool verify = true) {
    std::string into(70000, '\0');
    MemoryRef part = MemoryRef::host(into.data(), into.size());
    GetItem item{name, {&part, 1}};
    auto sizes = client.get({&item, 1}, verify);
    REQUIRE_MESSAGE(sizes.ok(), sizes.error().text);
    if ((*sizes)[0] == kMiss) return std::nullopt;
    into.resize(static_cast<size_t>((*sizes)[0]));
    return into;
}

uint64_t gauge(Server& server, const std::string& wanted) {
    for (auto& [name, value] : server.snapshot()) {
        if (name == wanted) return value;
    }
    FAIL("no gauge " << wanted);
    return 0;
}

// Content that names its key in each word.
std::string stamped(uint32_t key, size_t words) {
    std::string data;
    for (size_t i = 0; i < words; ++i) data.append(reinterpret_cast<const char*>(&key), sizeof(key));
    return data;
}

bool is_stamped(uint32_t key, const void* data, size_t size) {
    for (size_t i = 0; i + sizeof(key) <= size; i += sizeof(key)) {
        if (std::memcmp(static_cast<const char*>(data) + i, &key, sizeof(key)) != 0) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("server: put, get, exists, prefix, remove, list, stat over dial()") {
    auto server = make_server(4 << 20);
    Client client(dialing(*server));
    CHECK(put(client, "a", "first") == PutOutcome::kStored);
    CHECK(put(client, "a", "second") == PutOutcome::kExists);
    CHECK(*get(client, "a") == "first");
    CHECK(put(client, "a", "third", true) == PutOutcome::kStored);
    CHECK(*get(client, "a") == "third");
    CHECK(put(client, "b", "", false, "a") == PutOutcome::kStored);
    CHECK(get(client, "b")->empty());
    CHECK_FALSE(get(client, "absent"));
    std::string_view names[] = {"a", "b", "absent", "a"};
    CHECK(*client.exists(names) ==
          std::vector{Presence::kHit, Presence::kHit, Presence::kMiss, Presence::kHit});
    auto prefix = client.longest_prefix(names, 1, true);
    CHECK(prefix->blocks == 2);
    CHECK(gauge(*server, "objects_pinned") == 2);
    prefix = Prefix{};
    std::string_view one[] = {"a"};
    CHECK((*client.remove(one)).flags[0] == 1);
    CHECK((*client.remove(one)).flags[0] == 0);
    CHECK(client.list("", 10)->size() == 1);
    CHECK_FALSE(client.stat()->empty());
    CHECK(gauge(*server, "objects_pinned") == 0);
    CHECK(server->check_integrity());
}

TEST_CASE("server: a wrong token, no tenant, a closed client") {
    auto server = make_server(4 << 20);
    ClientOptions options = dialing(*server);
    options.token = "wrong";
    CHECK(Client(options).connect().error().code == Code::kAuth);
    options = dialing(*server);
    options.tenant = "nobody";
    CHECK(Client(options).connect().error().code == Code::kAuth);
    Client client(dialing(*server));
    REQUIRE(client.connect());
    client.close();
    CHECK(client.connect().error().code == Code::kClosed);
    CHECK(gauge(*server, "auth_failures_total") == 2);
}

TEST_CASE("server: over a socket path; the address is left alone by whoever did not get it") {
    char folder[] = "/tmp/mp-native-XXXXXX";
    REQUIRE(::mkdtemp(folder) != nullptr);
    std::string path = std::string(folder) + "/n.sock";
    {
        auto server = make_server(4 << 20, path);
        ServerOptions second;
        second.socket_path = path;
        second.token = kToken;
        second.pools = {PoolOptions{.arena_bytes = 1 << 20}};
        auto other = Server::create(second);
        REQUIRE(other);
        CHECK((*other)->start().error().text.find(path) != std::string::npos);
        other->reset();
        ClientOptions options;
        options.socket_path = path;
        options.token = kToken;
        Client client(options);
        CHECK(put(client, "k", "x") == PutOutcome::kStored);
        server->stop();
        CHECK(client.exists(std::vector<std::string_view>{"k"}).error().code == Code::kUnavailable);
        CHECK(::access(path.c_str(), F_OK) != 0);
    }
    ::rmdir(folder);
}

TEST_CASE("server: nothing is evicted from a node that has just started and has room") {
    constexpr int kObjects = 500;
    auto server = make_server(640ull << 20);
    Client client(dialing(*server));
    std::string data(1 << 20, 'x');
    for (int i = 0; i < kObjects; ++i)
        CHECK(put(client, "k" + std::to_string(i), data) == PutOutcome::kStored);
    CHECK(gauge(*server, "evicted_total") == 0);
    CHECK(gauge(*server, "objects") == kObjects);
    CHECK(server->check_integrity());
}

namespace {

constexpr uint64_t kPiece = 64 << 10;

std::unique_ptr<Server> make_reachable(uint64_t bytes, Limits limits = {}) {
    ServerOptions options;
    options.token = kToken;
    PoolOptions pool;
    pool.arena_bytes = bytes;
    options.pools = {pool};
    options.limits = limits;
    options.listen = {"127.0.0.1:0"};
    auto server = Server::create(std::move(options));
    REQUIRE(server);
    REQUIRE((*server)->start());
    return std::move(*server);
}

ClientOptions from_elsewhere(Server& server) {
    ClientOptions options;
    options.address = server.addresses().front();
    options.token = kToken;
    options.timeout_ms = 20000;
    return options;
}

std::vector<std::string> fill(Client& client, const std::string& name, int n) {
    std::vector<std::string> names;
    std::string data(kPiece, 'x');
    for (int i = 0; i < n; ++i) {
        names.push_back(name + std::to_string(i));
        CHECK(put(client, names.back(), data) == PutOutcome::kStored);
    }
    return names;
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

TEST_CASE("server: pins hold a share of the arena at most, those of other hosts a smaller one") {
    for (bool remote : {false, true}) {
        auto server = make_reachable(8 << 20);
        Client writer(dialing(*server));
        Client reader(remote ? from_elsewhere(*server) : dialing(*server));
        std::vector<std::string> names = fill(writer, "k", 110);
        std::vector<std::string_view> keys(names.begin(), names.end());
        auto pinned = reader.pin(keys);
        REQUIRE_MESSAGE(pinned.ok(), pinned.error().text);
        uint64_t most = (8 << 20) / 4 * (remote ? 1 : 3);
        uint64_t have = 0;
        for (size_t i = 0; i < keys.size(); ++i) have += pinned->has(i) ? 1 : 0;
        CHECK(have == most / kPiece);
        CHECK(gauge(*server, "pinned_bytes") == most);
        CHECK(gauge(*server, "remote_pinned_bytes") == (remote ? most : 0));
        CHECK(gauge(*server, "pins_refused_total") == 110 - have);
        auto prefix = reader.longest_prefix(keys, 2, true);
        REQUIRE(prefix);
        CHECK(prefix->blocks == have / 2);  // what is pinned already takes no more of the share
        CHECK(prefix->why.find("share_max") != std::string::npos);
        // Idle as it is, it ends the caching of nobody.
        fill(writer, "more", 300);
        CHECK(gauge(*server, "lease_refused_total") == 0);
        pinned = Pinned{};
        prefix = Prefix{};
        until([&] { return gauge(*server, "pinned_bytes") == 0; });
        CHECK(gauge(*server, "remote_pinned_bytes") == 0);
        CHECK(server->check_integrity());
    }
}

TEST_CASE("server: another host that holds pins without a word loses them, and reads no other bytes") {
    Limits limits;
    limits.remote_pin_idle_ms = 1;
    auto server = make_reachable(8 << 20, limits);
    Client writer(dialing(*server)), reader(from_elsewhere(*server));
    fill(writer, "k", 4);
    std::string_view keys[] = {"k0", "k1"};
    auto pinned = reader.pin(keys);
    REQUIRE(pinned);
    until([&] { return gauge(*server, "pins_idle_total") == 1; });
    CHECK(gauge(*server, "remote_pinned_bytes") == 0);
    fill(writer, "more", 300);
    size_t places[] = {0, 1};
    auto views = reader.views(*pinned, places, keys, true);
    CHECK((!views || (*views)[0].owner == nullptr));
    // The next call finds that out by itself.
    until([&] { return gauge(*server, "remote_connections") == 0; });
    std::string_view last = "more299";
    auto there = reader.exists({&last, 1});
    REQUIRE_MESSAGE(there.ok(), there.error().text);
    CHECK(there->front() == Presence::kHit);
    // A process of the own host keeps its pins, however long it says nothing.
    auto own = writer.pin({&last, 1});
    fill(writer, "again", 300);
    CHECK(writer.views(*own, std::span(places, 1), {&last, 1}, true)->front().owner != nullptr);
    CHECK(server->check_integrity());
}

TEST_CASE("server: namespaces are bounded, and given back with their last user and object") {
    Limits limits;
    limits.spaces = 4;
    auto server = make_reachable(4 << 20, limits);
    auto open = [&](const std::string& name_space, const std::string& fingerprint = {}) {
        ClientOptions options = dialing(*server);
        options.name_space = name_space;
        options.fingerprint = fingerprint;
        return std::make_unique<Client>(std::move(options));
    };
    for (int i = 0; i < 20; ++i) {
        auto client = open("n" + std::to_string(i));
        REQUIRE(client->connect());
        client.reset();
        until([&] { return gauge(*server, "spaces") == 0; });
    }
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 4; ++i) {
        clients.push_back(open("n" + std::to_string(i)));
        CHECK(put(*clients.back(), "k", "x") == PutOutcome::kStored);
    }
    CHECK(open("another")->connect().error().code == Code::kTooLarge);
    clients[0].reset();
    until([&] { return gauge(*server, "connections") <= 3; });
    CHECK(open("another")->connect().error().code == Code::kTooLarge);  // its object is there
    clients[0] = open("n0");
    CHECK(get(*clients[0], "k") == "x");
    std::string_view key = "k";
    REQUIRE(clients[0]->remove({&key, 1}));
    clients[0].reset();
    until([&] { return gauge(*server, "spaces") == 3; });
    auto another = open("another");
    CHECK_FALSE(get(*another, "k"));
    CHECK(open(std::string(2000, 'n'))->connect().error().code == Code::kInvalidArgument);
    CHECK(open("n", std::string(2000, 'f'))->connect().error().code == Code::kInvalidArgument);
    CHECK(server->check_integrity());
}

TEST_CASE("server: a connection that its client ends is not one that the node cut off") {
    auto server = make_reachable(4 << 20);
    auto closed = [&] { return gauge(*server, "connections_closed_total"); };
    auto dropped = [&] { return gauge(*server, "connections_dropped_total"); };
    for (bool remote : {false, true}) {
        Client client(remote ? from_elsewhere(*server) : dialing(*server));
        put(client, "k", "x");
    }
    until([&] { return closed() == 2; });
    CHECK(dropped() == 0);
    Result<Fd> garbled = server->dial();
    REQUIRE(garbled);
    std::string nonsense(64, '?');
    REQUIRE(::send(garbled->get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL) == 64);
    until([&] { return dropped() == 1; });
    Result<Fd> left = server->dial();  // in the middle of its handshake
    REQUIRE(left);
    left->reset();
    until([&] { return closed() == 3; });
    CHECK(dropped() == 1);
}

TEST_CASE("client: peers that say nothing share one deadline, and the last ones are not even asked") {
    // Sockets that take connections, and on which nobody answers.
    struct Silent {
        Fd fd;
        std::string address;
        Silent() {
            fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
            sockaddr_in at{};
            at.sin_family = AF_INET;
            at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            socklen_t size = sizeof(at);
            REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
            REQUIRE(::listen(fd.get(), 8) == 0);
            ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &size);
            address = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
        }
        bool was_called() { return Fd(::accept4(fd.get(), nullptr, nullptr, SOCK_CLOEXEC)).valid(); }
    };
    Silent peers[4];
    std::vector<std::unique_ptr<NodeClient>> nodes;
    for (Silent& peer : peers) {
        ClientOptions options;
        options.address = peer.address;
        options.token = kToken;
        options.timeout_ms = 400;
        nodes.push_back(std::make_unique<NodeClient>(std::move(options)));
    }
    std::string_view key = "k";
    {
        WaitBudget budget(WaitBudget::of_a_call(400));
        for (auto& node : nodes) CHECK_FALSE(node->exists({&key, 1}));
        CHECK(WaitBudget::within(400) <= 0);
    }
    CHECK(peers[0].was_called());
    CHECK_FALSE(peers[3].was_called());
    // The next call has its own; who failed a moment ago is not called again.
    WaitBudget budget(WaitBudget::of_a_call(400));
    CHECK_FALSE(nodes[3]->exists({&key, 1}));
    CHECK(peers[3].was_called());
}

TEST_CASE("server: connections of other hosts take no place from those of its own") {
    Limits limits;
    limits.connections = 2;
    limits.remote_connections = 3;
    auto server = make_reachable(4 << 20, limits);
    std::vector<std::unique_ptr<Client>> remote;
    for (int i = 0; i < 3; ++i) {
        remote.push_back(std::make_unique<Client>(from_elsewhere(*server)));
        REQUIRE(remote.back()->connect());
    }
    Client one_more(from_elsewhere(*server));
    CHECK_FALSE(one_more.connect());
    Client a(dialing(*server)), b(dialing(*server)), c(dialing(*server));
    CHECK(a.connect());
    CHECK(b.connect());
    CHECK(gauge(*server, "limits_raised_total") == 0);
    CHECK(c.connect());  // their limit rises
    CHECK(gauge(*server, "limits_raised_total") == 1);
    CHECK(gauge(*server, "connections_max") == 4);
    remote.pop_back();
    until([&] { return gauge(*server, "remote_connections") == 2; });
    Client again(from_elsewhere(*server));
    CHECK(again.connect());
}

TEST_CASE("server: threads put, get, pin, remove and look up the same few keys while all is evicted") {
    auto server = make_server(1 << 20);
    constexpr uint32_t kKeys = 64;
    constexpr int kOperations = 1500;
    std::atomic<uint64_t> hits{0}, views{0}, wrong{0}, failures{0};
    Client writers(dialing(*server)), readers(dialing(*server)), viewers(dialing(*server));
    std::vector<std::thread> threads;
    auto name_of = [](uint64_t key) { return "key-" + std::to_string(key); };
    for (uint64_t t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
            Random random(700 + t);
            for (int i = 0; i < kOperations; ++i) {
                auto key = static_cast<uint32_t>(random.below(kKeys));
                std::string name = name_of(key), data = stamped(key, random.between(0, 8000));
                MemoryRef part = MemoryRef::host(data.data(), data.size());
                PutItem item{name, {}, {&part, 1}};
                if (!writers.put({&item, 1}, PutOptions{random.one_in(2), !random.one_in(4)})) ++failures;
                std::string_view one = name;
                if (random.one_in(16) && !writers.remove({&one, 1})) ++failures;
            }
        });
        threads.emplace_back([&, t] {
            Random random(800 + t);
            std::string into(70000, '\0');
            for (int i = 0; i < kOperations; ++i) {
                auto key = static_cast<uint32_t>(random.below(kKeys));
                std::string name = name_of(key);
                MemoryRef part = MemoryRef::host(into.data(), into.size());
                GetItem item{name, {&part, 1}};
                auto sizes = readers.get({&item, 1}, random.one_in(2));
                if (!sizes) {
                    ++failures;
                } else if ((*sizes)[0] != kMiss) {
                    ++hits;
                    if (!is_stamped(key, into.data(), static_cast<size_t>((*sizes)[0]))) ++wrong;
                }
            }
        });
        threads.emplace_back([&, t] {
            Random random(900 + t);
            std::vector<std::pair<uint32_t, Pinned>> held;
            for (int i = 0; i < kOperations; ++i) {
                auto key = static_cast<uint32_t>(random.below(kKeys));
                std::string name = name_of(key);
                std::string_view one = name;
                auto pinned = viewers.pin({&one, 1});
                if (!pinned) {
                    ++failures;
                    continue;
                }
                if (pinned->descriptors[0].generation != 0) held.emplace_back(key, std::move(*pinned));
                if (held.size() < 8) continue;
                std::swap(held[random.below(held.size())], held.back());
                auto& [old_key, old] = held.back();
                const Descriptor& d = old.descriptors[0];
                if (!is_stamped(old_key, old.pin_of(0)->session()->path().in_place(d), d.size)) ++wrong;
                ++views;
                held.pop_back();
            }
        });
    }
    for (int i = 0; i < 50; ++i) {
        REQUIRE(server->check_integrity());
        REQUIRE_FALSE(server->snapshot().empty());
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(failures == 0);
    CHECK(hits > 0);
    CHECK(views > 0);
    CHECK(server->check_integrity());
    writers.close();
    readers.close();
    viewers.close();
    while (gauge(*server, "connections") != 0) std::this_thread::yield();
    CHECK(gauge(*server, "pins") == 0);
    CHECK(gauge(*server, "objects_pinned") == 0);
    CHECK(gauge(*server, "leased_bytes") == 0);
    CHECK(gauge(*server, "arena_free_bytes") + gauge(*server, "object_bytes") ==
          gauge(*server, "arena_ready_bytes"));
    CHECK(server->check_integrity());
}

// A connection whose questions are not answered one by one.
TEST_CASE("server: questions that waited for the backlog are answered though no further byte comes") {
    Limits limits;
    limits.send_backlog_bytes = 100;  // less than one answer: after each, the rest of the questions waits
    auto server = make_server(1 << 20, {}, limits);
    Fd fd = std::move(*server->dial());
    timeval tv{20, 0};
    REQUIRE(::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)) == 0);
    std::vector<std::byte> body;
    auto receive = [&] {
        FrameHeader header;
        REQUIRE(::recv(fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
        body.resize(header.length);
        REQUIRE(::recv(fd.get(), body.data(), body.size(), MSG_WAITALL) == ssize_t(body.size()));
        return header;
    };
    auto send = [&](const std::vector<std::byte>& frames) {
        REQUIRE(::send(fd.get(), frames.data(), frames.size(), MSG_NOSIGNAL) == ssize_t(frames.size()));
    };
    REQUIRE(receive().kind == Kind::kChallenge);
    Nonce node_nonce, nonce{};
    Incarnation life;
    std::memcpy(node_nonce.data(), body.data(), node_nonce.size());
    std::memcpy(life.data(), body.data() + node_nonce.size(), life.size());
    Mac mac = handshake_mac(Role::kClient, kToken, node_nonce, nonce, life, "default", kVersion);
    std::vector<std::byte> frames;
    size_t at = begin_frame(frames, Kind::kAuth, 0, 1);
    Writer w(frames);
    w.text16("default");
    w.bytes(nonce.data(), nonce.size());
    w.bytes(mac.data(), mac.size());
    finish_frame(frames, at);
    send(frames);
    REQUIRE(receive().kind == Kind::kWelcome);
    constexpr uint64_t kQuestions = 100;
    frames.clear();
    for (uint64_t id = 1; id <= kQuestions; ++id)
        finish_frame(frames, begin_frame(frames, Kind::kStat, 0, id));
    send(frames);
    for (uint64_t id = 1; id <= kQuestions; ++id) REQUIRE(receive().request_id == id);
}

TEST_CASE("server: stopped under its clients, every call ends") {
    for (int round = 0; round < 5; ++round) {
        auto server = make_server(1 << 20);
        std::vector<std::thread> threads;
        std::atomic<bool> stop{false};
        for (int t = 0; t < 3; ++t) {
            threads.emplace_back([&, t] {
                Client client(dialing(*server));
                std::string name = "k" + std::to_string(t), data(1000, 'x');
                MemoryRef part = MemoryRef::host(data.data(), data.size());
                PutItem item{name, {}, {&part, 1}};
                std::string_view one = name;
                while (!stop) {
                    (void)client.put({&item, 1}, PutOptions{true});
                    (void)client.longest_prefix({&one, 1}, 1, true);
                }
            });
        }
        while (gauge(*server, "stored_total") < 50) std::this_thread::yield();
        server->stop();
        stop = true;
        for (auto& thread : threads) thread.join();
    }
}

TEST_CASE("server: load copies into strided memory what another client pinned, or says why not") {
    auto server = make_server(4 << 20);
    Client saver(dialing(*server)), loader(dialing(*server));
    std::string a = stamped(1, 64), b = stamped(2, 64);
    put(saver, "a", a);
    put(saver, "b", b);
    std::string_view names[] = {"a", "b"};
    auto prefix = saver.longest_prefix(names, 1, true);
    REQUIRE(prefix->blocks == 2);
    // Two rows of 128 bytes for each of four blocks.
    std::vector<char> cache(2 * 4 * 128, 'e');
    auto base = reinterpret_cast<uint64_t>(cache.data());
    PartTable table({{{base, 128, 128}, {base + 512, 128, 128}}});
    uint32_t indices[] = {3, 0};
    uint16_t columns[] = {0, 0};
    Handover given = Client::hand_over(*prefix);
    auto report = loader.load(given.holders, given.descriptors, table, indices, columns, true);
    CHECK(report.ok == std::vector<uint8_t>{1, 1});
    CHECK(report.bytes == 512);
    CHECK(is_stamped(1, cache.data() + 3 * 128, 128));
    CHECK(is_stamped(1, cache.data() + 512 + 3 * 128, 128));
    CHECK(is_stamped(2, cache.data(), 128));
    CHECK(cache[128] == 'e');
    // Another life of the node, a column that is not there, a generation that is gone.
    std::string other = given.holders;
    other[0] ^= 1;
    CHECK(loader.load(other, given.descriptors, table, indices, columns, false).ok ==
          std::vector<uint8_t>{0, 0});
    uint16_t wrong_columns[] = {0, 7};
    CHECK(loader.load(given.holders, given.descriptors, table, indices, wrong_columns, false).ok ==
          std::vector<uint8_t>{1, 0});
    CHECK((*saver.remove(std::span(names).first(1))).flags[0] == 1);
    auto gone = loader.load(given.holders, given.descriptors, table, indices, columns, false);
    CHECK(gone.ok == std::vector<uint8_t>{0, 1});
    CHECK_FALSE(gone.error.empty());
}
