// Striped objects over a master, nodes and clients in one process. Clients and nodes speak TCP only: what a
// client maps of a node's memory another thread of this process would write, ordered by messages that
// ThreadSanitizer does not see.
#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "directory/master_server.hpp"
#include "store/client/client.hpp"
#include "store/node/server.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kArena = 8 << 20;        // a node takes 2 MiB at most, and stripes have 512 KiB
constexpr uint64_t kLarge = (5 << 20) + 1;  // 11 stripes
constexpr uint32_t kPatienceMs = 60000;     // sanitizers on a busy machine

bool comes_true(const std::function<bool()>& condition) {
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        ::poll(nullptr, 0, 2);  // lets others run; no event ends it
    }
    return true;
}

uint64_t gauge(Server& server, const std::string& wanted) {
    for (auto& [name, value] : server.snapshot()) {
        if (name == wanted) return value;
    }
    return 0;
}

class StripedBed {
   public:
    explicit StripedBed(size_t nodes) {
        MasterServerOptions options;
        options.addresses = {"127.0.0.1:0"};
        options.token = kToken;
        options.master.membership.suspect_ms = kPatienceMs;
        options.master.membership.gone_ms = 2 * kPatienceMs;
        auto made = MasterServer::create(std::move(options));
        REQUIRE(made);
        master_ = std::move(*made);
        REQUIRE(master_->start());
        for (size_t i = 0; i < nodes; ++i) add_node("host-" + std::to_string(i));
    }
    StripedBed(const StripedBed&) = delete;

    Server& node(size_t i) { return *nodes_[i]; }
    const std::string& address(size_t i) const { return addresses_[i]; }
    uint64_t locates() const {  // frames
        uint64_t frames = 0;
        for (size_t i = 0; i <= LatencyHistogram::kBoundsSeconds.size(); ++i) {
            frames += master_->metrics().locate.count(i);
        }
        return frames;
    }
    std::unique_ptr<Client> client(size_t i) {
        ClientOptions options;
        options.address = addresses_[i];
        options.token = kToken;
        options.timeout_ms = kPatienceMs;
        return std::make_unique<Client>(std::move(options));
    }
    uint64_t total(const std::string& name) {
        uint64_t sum = 0;
        for (auto& node : nodes_) sum += gauge(*node, name);
        return sum;
    }
    // The directory knows of all objects, and of no others.
    bool told() {
        return comes_true([this] {
            uint64_t rows = 0, applied = 0;
            for (auto& [name, value] : master_->snapshot()) {
                if (name == "directory_rows") rows = value;
                bool counts =
                    name == "rows_added_total" || name == "rows_removed_total" || name == "rows_void_total";
                if (counts) applied += value;
            }
            return total("master_rows_waiting") == 0 && total("master_rows_sent_total") == applied &&
                   rows == total("objects");
        });
    }

   private:
    static constexpr const char* kToken = "a token";

    void add_node(const std::string& host) {
        ServerOptions options;
        options.token = kToken;
        PoolOptions pool;
        pool.arena_bytes = kArena;
        options.pools = {pool};
        options.limits.remote_pins_share = 0.75;
        options.listen = {"127.0.0.1:0"};
        options.cluster.master = master_->addresses().front();
        options.cluster.name = host;
        options.cluster.host_id = host;
        auto server = Server::create(std::move(options));
        REQUIRE(server);
        REQUIRE((*server)->start());
        addresses_.push_back((*server)->addresses().front());
        nodes_.push_back(std::move(*server));
        REQUIRE(comes_true([this] { return gauge(*nodes_.back(), "master_joined") == 1; }));
    }

    std::unique_ptr<MasterServer> master_;
    std::vector<std::unique_ptr<Server>> nodes_;
    std::vector<std::string> addresses_;
};

PutReport put_bytes(Client& client, std::string_view name, const std::string& bytes,
                    PutOptions options = {}) {
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    PutItem item{name, {}, {&part, 1}};
    auto report = client.put({&item, 1}, options);
    REQUIRE_MESSAGE(report.ok(), report.error().text);
    return *report;
}

// Nothing: a miss, or an error.
std::optional<std::string> get_bytes(Client& client, std::string_view name) {
    std::string into(kLarge, '\0');
    MemoryRef part = MemoryRef::host(into.data(), into.size());
    GetItem item{name, {&part, 1}};
    auto sizes = client.get({&item, 1}, true);
    if (!sizes || sizes->front() < 0) return std::nullopt;
    into.resize(static_cast<size_t>(sizes->front()));
    return into;
}

Presence is_there(Client& client, std::string_view name) { return client.exists({&name, 1})->front(); }

}  // namespace

TEST_CASE("striped: readers that are overtaken get one object or the other") {
    StripedBed bed(3);
    auto writer = bed.client(0);
    auto content = [](size_t i) {
        return std::string(i % 2 == 0 ? kLarge : 100, static_cast<char>('a' + i));
    };
    CHECK(put_bytes(*writer, "k", content(0)).outcomes[0] == PutOutcome::kStored);
    REQUIRE(bed.told());
    std::atomic<bool> over{false};
    std::atomic<int> wrong{0}, reads{0};
    std::vector<std::thread> readers;
    for (size_t i : {1, 2}) {
        readers.emplace_back([&, client = std::shared_ptr<Client>(bed.client(i))] {
            while (!over) {
                std::optional<std::string> got = get_bytes(*client, "k");
                wrong += !got || got->empty() || *got != content(static_cast<size_t>(got->front() - 'a'));
                ++reads;
            }
        });
    }
    PutOptions replace{.replace = true};
    for (size_t i = 1; i < 12; ++i) {
        CHECK(put_bytes(*writer, "k", content(i), replace).outcomes[0] == PutOutcome::kStored);
    }
    over = true;
    for (std::thread& reader : readers) reader.join();
    CHECK(wrong == 0);
    MESSAGE(reads.load() << " reads while there were 11 replacements");
    CHECK(bed.total("object_bytes") == 100);
}

TEST_CASE("striped: one that lost a stripe ends, and its copies keep another") {
    StripedBed bed(3);
    auto client = bed.client(0);
    std::string bytes(kLarge, 'x');
    CHECK(put_bytes(*client, "lost", bytes).outcomes[0] == PutOutcome::kStored);
    REQUIRE(bed.told());
    std::string_view lost = "lost";
    {
        auto pinned = client->pin({&lost, 1});
        REQUIRE(pinned);
        CHECK(pinned->has(0));
        CHECK(bed.total("objects_pinned") == 12);
    }
    CHECK(comes_true([&] { return bed.total("objects_pinned") == 0; }));
    // Node 1 evicts what it has of it.
    PutOptions there{.nodes = {bed.address(1)}};
    std::string filler(1 << 20, 'f');
    for (int i = 0; i < 9; ++i) {
        put_bytes(*client, "f" + std::to_string(i), filler, there);
    }
    REQUIRE(bed.told());
    CHECK(is_there(*client, "lost") == Presence::kMiss);
    CHECK_FALSE(get_bytes(*client, "lost"));
    CHECK(gauge(bed.node(0), "objects") == 0);
    CHECK(gauge(bed.node(2), "objects") == 0);
    // Each stripe is at two nodes: what one evicts the other still has.
    PutReport put = put_bytes(*client, "lost", bytes, PutOptions{.replicas = 2});
    CHECK(put.outcomes[0] == PutOutcome::kStored);
    CHECK(put.copies == std::vector<uint8_t>{2});
    REQUIRE(bed.told());
    for (int i = 0; i < 9; ++i) {
        put_bytes(*client, "g" + std::to_string(i), filler, there);
    }
    REQUIRE(bed.told());
    CHECK(is_there(*client, "lost") == Presence::kHit);
    CHECK(get_bytes(*client, "lost") == bytes);
}

TEST_CASE("striped: the stripes of many objects are asked for together") {
    StripedBed bed(2);
    auto client = bed.client(0);
    std::string bytes(2 * kArena / 5, 'x');
    std::vector<std::string> keys;
    for (int i = 0; i < 3; ++i) keys.push_back("k" + std::to_string(i));
    for (const std::string& key : keys)
        CHECK(put_bytes(*client, key, bytes).outcomes[0] == PutOutcome::kStored);
    REQUIRE(bed.told());
    std::vector<std::string_view> names(keys.begin(), keys.end());
    uint64_t before = bed.locates();
    CHECK(*client->exists(names) == std::vector<Presence>(names.size(), Presence::kHit));
    CHECK(bed.locates() - before <= 2);  // for manifests, and for the stripes of all
}
