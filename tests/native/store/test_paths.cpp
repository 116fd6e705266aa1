// What every path to a node does, by the table of paths: a further row is tested here without another line,
// but for how a node of this test is reached by it.
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "../random.hpp"
#include "store/client/client.hpp"
#include "store/node/server.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kLarge = 40 * kMiB;  // over what one READ brings

struct Node {
    std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("moonpool-paths-" + std::to_string(::getpid()));
    std::unique_ptr<Server> server;

    Node() {
        std::filesystem::create_directories(folder);
        ServerOptions options;
        options.socket_path = folder / "node.sock";
        options.listen = {"127.0.0.1:0"};
        options.token = "a token";
        PoolOptions pool;
        pool.arena_bytes = 256 * kMiB;
        options.pools = {pool};
        auto made = Server::create(std::move(options));
        REQUIRE_MESSAGE(made.ok(), made.error().text);
        server = std::move(*made);
        REQUIRE(server->start());
    }
    ~Node() {
        server.reset();
        std::filesystem::remove_all(folder);
    }

    std::string route(std::string_view path) const {
        if (path == "unix") return "unix:" + (folder / "node.sock").string();
        if (path == "tcp") return "tcp:" + server->addresses().front();
        FAIL("how is a node reached by " << path << "?");
        return "";
    }
    NodeClient client(std::string_view path) const {
        ClientOptions options;
        options.token = "a token";
        options.timeout_ms = 20000;  // sanitizers on a busy machine
        REQUIRE(set_route(options, route(path)));
        return NodeClient(std::move(options));
    }
};

std::string noise(uint64_t size, Random& random) {
    std::string bytes(size, '\0');
    for (uint64_t i = 0; i < size; i += 61) bytes[i] = static_cast<char>(random.below(256));
    return bytes;
}

PutOutcome put(NodeClient& client, std::string_view name, std::string& bytes, bool replace = false) {
    MemoryRef parts[] = {MemoryRef::host(bytes.data(), bytes.size() / 3),
                         MemoryRef::host(bytes.data() + bytes.size() / 3, bytes.size() - bytes.size() / 3)};
    PutItem item{name, {}, parts};
    auto report = client.put({&item, 1}, {.replace = replace});
    REQUIRE_MESSAGE(report.ok(), report.error().text);
    return report->outcomes[0];
}

template <class Body>
void by_every_path(Body body) {
    Node node;
    REQUIRE(path_registry().size() >= 2);
    for (const PathFactory& row : path_registry()) {
        CAPTURE(row.name);
        NodeClient client = node.client(row.name);
        REQUIRE(client.connect());
        CHECK(client.current()->path().route() == node.route(row.name));
        body(client, std::string(row.name));
    }
}

}  // namespace

TEST_CASE("every path: objects of all sizes come back as they were put") {
    Random random;
    by_every_path([&](NodeClient& client, const std::string& path) {
        for (uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{70000}, kLarge}) {
            std::string name = path + std::to_string(size), bytes = noise(size, random);
            CHECK(put(client, name, bytes) == PutOutcome::kStored);
            CHECK(put(client, name, bytes) == PutOutcome::kExists);
            std::string into(size + 100, 'x');
            MemoryRef parts[] = {MemoryRef::host(into.data(), 10),
                                 MemoryRef::host(into.data() + 10, size + 90)};
            GetItem item{name, parts};
            auto sizes = client.get({&item, 1}, true);
            REQUIRE_MESSAGE(sizes.ok(), sizes.error().text);
            CHECK((*sizes)[0] == static_cast<int64_t>(size));
            CHECK(into.substr(0, size) == bytes);
            CHECK(into.substr(size) == std::string(100, 'x'));
        }
    });
}

TEST_CASE("every path: a miss, and a destination that is too small") {
    by_every_path([&](NodeClient& client, const std::string& path) {
        for (uint64_t size : {uint64_t{4096}, kLarge}) {
            std::string name = path + std::to_string(size), bytes(size, 'a'), into(100, 'x');
            REQUIRE(put(client, name, bytes) == PutOutcome::kStored);
            MemoryRef part = MemoryRef::host(into.data(), into.size());
            GetItem items[] = {{"nothing", {&part, 1}}, {name, {&part, 1}}};
            auto refused = client.get(items, true);
            REQUIRE_FALSE(refused.ok());
            CHECK(refused.error().code == Code::kInvalidArgument);
            auto sizes = client.get(items, true, true);
            REQUIRE(sizes.ok());
            CHECK(*sizes == std::vector<int64_t>{kMiss, static_cast<int64_t>(size)});
            CHECK(into == std::string(100, 'x'));
        }
    });
}

TEST_CASE("every path: what is pinned is read, viewed and loaded, also once it was removed") {
    Random random;
    by_every_path([&](NodeClient& client, const std::string& path) {
        std::string name = path + "pinned", bytes = noise(3 * kMiB, random);
        REQUIRE(put(client, name, bytes) == PutOutcome::kStored);
        std::string_view names[] = {name};
        Result<Pinned> pinned = client.pin(names);
        REQUIRE(pinned.ok());
        REQUIRE(pinned->has(0));
        size_t places[] = {0};
        CHECK(NodeClient::verify(*pinned, places, names));

        std::string into(bytes.size(), 'x');
        PartTable table({{{reinterpret_cast<uint64_t>(into.data()), 0, kMiB},
                          {reinterpret_cast<uint64_t>(into.data()) + kMiB, 0, 2 * kMiB}}});
        LoadReport report;
        report.ok.assign(1, 0);
        uint32_t which[] = {0}, indices[] = {0};
        uint16_t columns[] = {0};
        client.load(client.current()->incarnation(), pinned->descriptors, which, table, indices, columns,
                    true, report);
        CHECK_MESSAGE(report.ok[0] == 1, report.error);
        CHECK(into == bytes);

        std::vector<RemovedManifest> manifests;
        REQUIRE(client.remove(names, manifests));
        into.assign(bytes.size(), 'x');
        MemoryRef part = MemoryRef::host(into.data(), into.size());
        GetItem item{name, {&part, 1}};
        auto sizes = NodeClient::get_pinned(*pinned, places, {&item, 1}, true);
        REQUIRE_MESSAGE(sizes.ok(), sizes.error().text);
        if (client.current()->path().in_place(pinned->descriptors[0]) != nullptr) {
            CHECK((*sizes)[0] == static_cast<int64_t>(bytes.size()));
            CHECK(into == bytes);
        }
        auto views = NodeClient::views(*pinned, places);
        REQUIRE(views.ok());
        if ((*views)[0].owner != nullptr) {
            CHECK(std::memcmp((*views)[0].data, bytes.data(), bytes.size()) == 0);
        }
    });
}

TEST_CASE("every path: memory of a kind that it does not move is refused, and not touched") {
    by_every_path([&](NodeClient& client, const std::string& path) {
        std::string name = path + "device", bytes(4096, 'a');
        MemoryRef device{.address = 0x1000, .bytes = 4096, .device = 0, .kind = MemoryKind::kDevice};
        PutItem put_item{name, {}, {&device, 1}};
        auto report = client.put({&put_item, 1}, {});
        REQUIRE_FALSE(report.ok());
        CHECK(report.error().code == Code::kInvalidArgument);
        CHECK(report.error().text.find("device memory") != std::string::npos);

        REQUIRE(put(client, name, bytes) == PutOutcome::kStored);
        GetItem item{name, {&device, 1}};
        auto sizes = client.get({&item, 1}, true);
        REQUIRE_FALSE(sizes.ok());
        CHECK(sizes.error().code == Code::kInvalidArgument);
        std::string_view names[] = {name};
        Result<Pinned> pinned = client.pin(names);
        REQUIRE(pinned.ok());
        size_t places[] = {0};
        CHECK_FALSE(NodeClient::get_pinned(*pinned, places, {&item, 1}, true).ok());
    });
}
