// Server and clients in one process, over dial() and over a socket path, with several threads at once.
//
// Each writer and each reader is a Client of its own, or shares one with threads that do the same: two
// threads that read and write the same mapping of the arena are ordered by the node's answers in between,
// which ThreadSanitizer cannot see.
#include <doctest/doctest.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "../random.hpp"
#include "store/client.hpp"
#include "store/server.hpp"

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
    Part part{reinterpret_cast<std::byte*>(const_cast<char*>(data.data())), data.size()};
    PutItem item{name, parent, {&part, 1}};
    auto report = client.put({&item, 1}, PutOptions{replace, ack});
    REQUIRE_MESSAGE(report.ok(), report.error().text);
    return report->outcomes[0];
}

std::optional<std::string> get(Client& client, std::string_view name, bool verify = true) {
    std::string into(70000, '\0');
    Part part{reinterpret_cast<std::byte*>(into.data()), into.size()};
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
    CHECK((*client.remove(one))[0] == 1);
    CHECK((*client.remove(one))[0] == 0);
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
                Part part{reinterpret_cast<std::byte*>(data.data()), data.size()};
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
                Part part{reinterpret_cast<std::byte*>(into.data()), into.size()};
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
                if (!is_stamped(old_key, old.pin_of(0)->session()->arena() + d.offset, d.size)) ++wrong;
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
    Mac mac = handshake_mac(Role::kClient, kToken, node_nonce, nonce, life, "default");
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
                Part part{reinterpret_cast<std::byte*>(data.data()), data.size()};
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
    CHECK((*saver.remove(std::span(names).first(1)))[0] == 1);
    auto gone = loader.load(given.holders, given.descriptors, table, indices, columns, false);
    CHECK(gone.ok == std::vector<uint8_t>{0, 1});
    CHECK_FALSE(gone.error.empty());
}
