// Loads that a card reads straight from pinned parts of the node's arena: which bytes arrive, and what is
// said of an object that is removed, and whose memory is written, while a copy of it is queued. And how long
// the pins last: as long as that life of the node, whatever becomes of connections to it.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../process.hpp"
#include "device_kv_bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr uint64_t kArenaBytes = 64 * kMiB;  // of Node

DeviceKvOptions straight(DeviceKvOptions options, uint64_t part_bytes = 4 * kMiB) {
    options.arena = {.part_bytes = part_bytes, .object_bytes_min = 0};
    return options;
}

// The node gathers its memory first, or finds that it cannot.
ArenaPins pin_all(DeviceKv& kv, Client& client, uint64_t bytes = UINT64_MAX) {
    for (;;) {
        ArenaPins pins = kv.pin_arena(client, bytes);
        if (pins.why.find("settled") == std::string::npos) return pins;
        std::this_thread::yield();
    }
}

int batches() { return soft_device().soft_calls("cuMemcpyBatchAsync"); }
int copies() { return soft_device().soft_calls("cuMemcpyAsync") + batches(); }

// An engine on the bed's card whose KV cache is in the pool; what it writes afterwards is not.
struct Saved {
    Random random;
    Client client;
    Cache cache;
    std::shared_ptr<DeviceKv> kv;
    Objects objects;
    std::vector<std::string_view> names = objects.views();
    std::vector<unsigned char> truth{};

    Saved(Bed& bed, const ClientOptions& node, const DeviceKvOptions& options, char tag,
          const KvShape& shape = kShape)
        : random(90), client(node), cache(bed, shape), kv(cache.open(options)), objects(shape, tag) {
        REQUIRE(client.connect());
        cache.write(random);
        must(save(*kv, client, objects, must(kv->mark(cache.stream()))));
        truth = cache.host.bytes();
        cache.write(random);  // other requests have the blocks now
        finish(bed, cache.engine);
    }
    // Of the objects that a load says are there.
    bool right(const LoadReport& report) {
        std::vector<unsigned char> there = cache.read();
        for (size_t i = 0; i < names.size(); ++i) {
            uint32_t block = objects.blocks[i];
            uint16_t column = objects.columns[i];
            if (report.ok[i] != 0 && object_at(cache.shape, there, block, column) !=
                                         object_at(cache.shape, truth, block, column)) {
                return false;
            }
        }
        return true;
    }
    LoadReport load_all() { return load(*kv, client, objects, cache.shape.heads, nullptr); }
    // To load by; nothing of it stays pinned.
    Handover handed_over() {
        return Client::hand_over(must(client.longest_prefix(names, cache.shape.heads, true)));
    }
    // What the node says of itself.
    uint64_t told(std::string_view name) {
        for (const auto& [row, value] : must(client.stat())) {
            if (row == name) return value;
        }
        FAIL("the node has no such row");
        return 0;
    }
    std::vector<Descriptor> places() {
        return must(client.longest_prefix(names, cache.shape.heads, false)).descriptors;
    }
};

int given_back() { return soft_device().soft_calls("cuMemHostUnregister"); }

// In parts of 4 MiB.
bool all_given_back() { return given_back() == static_cast<int>(kArenaBytes / (4 * kMiB)); }

void eventually(const std::function<bool()>& holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!holds()) {
        REQUIRE(std::chrono::steady_clock::now() < end);
        std::this_thread::yield();
    }
}

// Those of this process to the node there.
void cut_connections(const std::string& socket_path) {
    int cut = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        int fd = std::stoi(entry.path().filename());
        sockaddr_un peer{};
        socklen_t size = sizeof(peer);
        if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
        if (peer.sun_family != AF_UNIX || socket_path != peer.sun_path) continue;
        REQUIRE(::shutdown(fd, SHUT_RDWR) == 0);
        ++cut;
    }
    REQUIRE(cut > 0);
}

// Where an object lies, and the right to write there: a node that gives its memory to others.
class ArenaWriter {
   public:
    explicit ArenaWriter(Client& client) : arena_(must(client.own_arena())) {
        REQUIRE(::mprotect(const_cast<std::byte*>(arena_->data()), arena_->size(), PROT_READ | PROT_WRITE) ==
                0);
    }
    void overwrite(const Descriptor& d) {
        std::memset(const_cast<std::byte*>(arena_->data()) + d.offset, 0xEE, d.size);
    }

   private:
    std::unique_ptr<OwnArena> arena_;
};

}  // namespace

TEST_CASE("device kv: what lies in pinned parts of the arena is loaded without the ring") {
    Node node;
    for (const DeviceKvOptions* options : {&kSmall, &kDirect, &kTight}) {
        each_policy([&](Bed& bed) {
            Saved saved(bed, node.options(), straight(*options), 'A');
            if (!bed.device->facts().registers_read_only) return;
            ArenaPins pins = pin_all(*saved.kv, saved.client);
            CHECK(pins.why == "");
            CHECK(pins.pinned_bytes == kArenaBytes);
            CHECK(pins.arena_bytes == kArenaBytes);
            int before = is_real() ? 0 : batches();
            LoadReport report = saved.load_all();
            CHECK(all_ok(report));
            CHECK(report.error == "");
            CHECK(report.bytes == kShape.bytes());
            CHECK(saved.cache.read() == saved.truth);
            // By the kernel only a chunk with objects of the arena makes a batch.
            if (!is_real()) CHECK(batches() > before);
            REQUIRE(saved.client.remove(saved.names));
            REQUIRE(saved.kv->close(5000));
        });
    }
}

TEST_CASE("device kv: one load takes what is pinned from the arena, and the rest through the ring") {
    Node node;
    if (is_real()) return;
    // Objects of 5,248 bytes, of which some lie in two parts; several to a chunk.
    constexpr uint64_t kPart = 8 << 10;
    KvShape shape = kShape;
    shape.content = 656;
    DeviceKvOptions options =
        straight({.ring_bytes = 256 << 10, .slot_bytes = 32 << 10, .load_lanes = 2}, kPart);
    for (uint64_t direct_row_bytes : {options.direct_row_bytes, uint64_t{1}}) {
        options.direct_row_bytes = direct_row_bytes;
        each_policy([&](Bed& bed) {
            Saved saved(bed, node.options(), options, 'B', shape);
            uint64_t end = 0;
            size_t in_one = 0;
            std::vector<Descriptor> places = saved.places();
            for (const Descriptor& d : places) {
                end = std::max(end, d.offset + d.size);
                in_one += d.offset / kPart == (d.offset + d.size - 1) / kPart ? 1 : 0;
            }
            CHECK(in_one > 0);
            CHECK(in_one < places.size());
            (void)pin_all(*saved.kv, saved.client, (end + kPart) / kPart * kPart);
            int before = batches();
            LoadReport report = saved.load_all();
            CHECK(all_ok(report));
            CHECK(report.bytes == shape.bytes());
            CHECK(saved.cache.read() == saved.truth);
            CHECK(batches() > before);
            REQUIRE(saved.client.remove(saved.names));
        });
    }
}

TEST_CASE("device kv: the ring carries what is short, and what is to be compared with its checksum") {
    Node node;
    if (is_real()) return;
    each_policy([&](Bed& bed) {
        DeviceKvOptions options = straight(kSmall);
        for (bool verify : {true, false}) {
            options.arena.object_bytes_min = kShape.object_bytes() + (verify ? 0 : 1);
            Saved saved(bed, node.options(), options, 'V');
            CHECK(pin_all(*saved.kv, saved.client).why == "");
            Prefix prefix = must(saved.client.longest_prefix(saved.names, kShape.heads, true));
            Handover handover = Client::hand_over(prefix);
            CHECK(all_ok(
                saved.kv->load(saved.client, {handover.holders, handover.descriptors, saved.objects.blocks,
                                              saved.objects.columns, verify, nullptr})));
            CHECK(saved.cache.read() == saved.truth);
            CHECK(batches() == 0);
            REQUIRE(saved.client.remove(saved.names));
        }
    });
}

TEST_CASE("device kv: an object that is removed and overwritten under a card's copy has failed") {
    Node node;
    if (is_real()) return;
    for (const DeviceKvOptions* options : {&kSmall, &kDirect}) {
        each_policy([&](Bed& bed) {
            Saved saved(bed, node.options(), straight(*options), 'C');
            CHECK(pin_all(*saved.kv, saved.client).why == "");
            ArenaWriter writer(saved.client);
            std::vector<Descriptor> handed;
            std::string holders;
            {
                Prefix prefix = must(saved.client.longest_prefix(saved.names, kShape.heads, true));
                Handover handover = Client::hand_over(prefix);
                handed = handover.descriptors;
                holders = handover.holders;
            }  // the pin is over
            int before = batches();
            soft_device().soft_hang(1);  // the first copy of the load
            std::future<LoadReport> loading = std::async(std::launch::async, [&] {
                return saved.kv->load(saved.client, {holders, handed, saved.objects.blocks,
                                                     saved.objects.columns, false, nullptr});
            });
            while (batches() == before) std::this_thread::yield();
            REQUIRE(saved.client.remove(saved.names));
            for (const Descriptor& d : handed) writer.overwrite(d);
            soft_device().soft_unhang();
            LoadReport report = loading.get();
            CHECK_FALSE(all_ok(report));
            CHECK(report.error.find("a pinned object was removed ") == 0);
            CHECK(saved.right(report));
        });
    }
}

TEST_CASE("device kv: a node that a test kills" * doctest::skip()) {
    Parent parent;
    Node node;
    parent.say(node.folder);
    (void)parent.hear();
}

TEST_CASE("device kv: a node that is killed while a card reads its arena") {
    if (is_real()) return;
    for (Policy policy : {Policy::kLate, Policy::kShuffled}) {
        Child node("device kv: a node that a test kills");
        const std::filesystem::path folder = node.hear();
        ClientOptions options;
        options.socket_path = folder / "node.sock";
        options.token = "a token";
        options.timeout_ms = 20000;
        Bed bed(policy, 3);
        {
            Saved saved(bed, options, straight(kSmall), 'D');
            CHECK(pin_all(*saved.kv, saved.client).why == "");
            int before = batches();
            soft_device().soft_hang(1);
            std::future<LoadReport> loading =
                std::async(std::launch::async, [&] { return saved.load_all(); });
            while (batches() == before) std::this_thread::yield();
            node.kill();
            soft_device().soft_unhang();
            // What had been looked up is whole: a node that is dead removes nothing.
            LoadReport report = loading.get();
            CHECK(std::ranges::find(report.ok, 1) != report.ok.end());
            CHECK(saved.right(report));
            // The next load gives the memory back, with the last chunk that used it.
            Descriptor gone{.size = kShape.object_bytes(), .generation = 1};
            uint32_t block = 0;
            uint16_t column = 0;
            LoadReport later = saved.kv->load(
                saved.client, {std::string(16, '\0'), {&gone, 1}, {&block, 1}, {&column, 1}, false, nullptr});
            CHECK(later.ok == std::vector<uint8_t>{0});
            eventually(all_given_back);
        }
        bed.end();
        std::filesystem::remove_all(folder);
    }
}

TEST_CASE("device kv: the pins outlive an answer that came too late, and the connection does not") {
    if (is_real()) return;
    Child node("device kv: a node that a test kills");
    const std::filesystem::path folder = node.hear();
    ClientOptions options;
    options.socket_path = folder / "node.sock";
    options.token = "a token";
    options.timeout_ms = 20000;
    Bed bed(Policy::kShuffled, 4);
    {
        Saved saved(bed, options, straight(kSmall), 'S');
        const auto& [holders, handed] = saved.handed_over();
        DeviceLoad load{holders, handed, saved.objects.blocks, saved.objects.columns, false, nullptr};
        const size_t n = handed.size();
        // A client with little patience pins and loads; the other one asks.
        options.timeout_ms = 200;
        Client hasty(options);
        eventually([&] { return hasty.connect().ok(); });
        CHECK(pin_all(*saved.kv, hasty).why == "");
        const uint64_t connections = saved.told("connections");
        REQUIRE(saved.told("pins") == 0);
        auto from_the_arena = [&] {
            saved.cache.write(saved.random);
            load.after = must(saved.kv->mark(saved.cache.stream()));
            int before = batches();
            LoadReport report = saved.kv->load(hasty, load);
            CHECK(all_ok(report));
            CHECK(saved.cache.read() == saved.truth);
            CHECK(batches() > before);
            CHECK(given_back() == 0);
        };
        // What was read counts as a use.
        auto counted_from_the_arena = [&] {
            const uint64_t served = saved.told("served_total");
            from_the_arena();
            eventually([&] { return saved.told("served_total") >= served + n; });
        };
        counted_from_the_arena();

        REQUIRE(::kill(node.pid(), SIGSTOP) == 0);
        int status = 0;
        REQUIRE(::waitpid(node.pid(), &status, WUNTRACED) == node.pid());
        // The node will pin them for a client that has given up.
        Result<Prefix> asked = hasty.longest_prefix(saved.names, kShape.heads, true);
        CHECK((!asked || asked->pins.empty()));
        CHECK_FALSE(hasty.connected());
        from_the_arena();  // no node answers
        REQUIRE(::kill(node.pid(), SIGCONT) == 0);

        eventually([&] { return hasty.connect().ok(); });
        counted_from_the_arena();
        // The old connection is over, with what was pinned over it.
        eventually([&] { return saved.told("connections") == connections; });
        eventually([&] { return saved.told("pins") == 0; });

        node.kill();
        CHECK_FALSE(all_ok(saved.kv->load(
            hasty, {std::string(16, '\0'), load.descriptors, load.blocks, load.columns, false, nullptr})));
        eventually(all_given_back);
    }
    bed.end();
    std::filesystem::remove_all(folder);
}

TEST_CASE(
    "device kv: a node in its own process keeps the pins over a cut connection, and loses them by its end") {
    if (is_real()) return;
    for (bool restarted : {false, true}) {
        Bed bed(Policy::kLate);
        {
            std::optional<Node> node(std::in_place);
            Saved saved(bed, node->options(), straight(kSmall), 'T');
            CHECK(pin_all(*saved.kv, saved.client).why == "");
            const auto& [holders, handed] = saved.handed_over();
            DeviceLoad load{holders, handed, saved.objects.blocks, saved.objects.columns, false, nullptr};
            cut_connections(node->options().socket_path);
            int before = batches();
            CHECK(all_ok(saved.kv->load(saved.client, load)));
            CHECK(batches() > before);
            CHECK(given_back() == 0);

            node.reset();
            if (restarted) node.emplace();
            CHECK_FALSE(all_ok(saved.kv->load(saved.client, load)));
            eventually(all_given_back);
        }
        bed.end();
    }
}

TEST_CASE("device kv: where the driver pins less than was asked for, the ring carries the rest") {
    Node node;
    if (is_real()) return;
    for (bool limit : {true, false}) {
        each_policy([&](Bed& bed) {
            Saved saved(bed, node.options(), straight(kSmall, kMiB), 'E');
            if (limit) {
                soft_device().soft_limit(UINT64_MAX, 3 * kMiB);
            } else {
                soft_device().soft_fail("cuMemHostRegister", 3, 801);
            }
            ArenaPins pins = pin_all(*saved.kv, saved.client);
            CHECK(pins.pinned_bytes == 2 * kMiB);
            CHECK(pins.why.find("cuMemHostRegister: ") == 0);
            CHECK(all_ok(saved.load_all()));
            CHECK(saved.cache.read() == saved.truth);
            REQUIRE(saved.client.remove(saved.names));
        });
    }
    // Not a byte, and no node.
    Bed bed(Policy::kLate);
    {
        Saved saved(bed, node.options(), straight(kSmall), 'F');
        soft_device().soft_refuse("cuMemHostRegister", 800);
        CHECK(pin_all(*saved.kv, saved.client).pinned_bytes == 0);
        CHECK(all_ok(saved.load_all()));
        CHECK(saved.cache.read() == saved.truth);
        soft_device().soft_refuse("cuMemHostRegister", 0);
        ClientOptions nowhere = node.options();
        nowhere.socket_path = "/no/such/node.sock";
        Client absent(nowhere);
        std::shared_ptr<DeviceKv> kv = saved.cache.open(straight(kSmall));
        ArenaPins pins = kv->pin_arena(absent, UINT64_MAX);
        CHECK(pins.pinned_bytes == 0);
        CHECK(pins.why.find("no node serves") == 0);
        REQUIRE(saved.client.remove(saved.names));
    }
    bed.end();
}

TEST_CASE("device kv: a card that hangs while it reads the arena keeps it, and close() has an end") {
    Node node;
    if (is_real()) return;
    for (bool kernel_fails : {false, true}) {
        Bed bed(Policy::kLate);
        {
            Saved saved(bed, node.options(), straight(kSmall), 'G');
            CHECK(pin_all(*saved.kv, saved.client).why == "");
            int before = batches(), released = soft_device().soft_calls("cuMemHostUnregister");
            soft_device().soft_hang(1);
            if (kernel_fails) soft_device().soft_fail("cuLaunchKernel", 1, 1);
            // One chunk: what is known of it decides.
            Objects one = saved.objects;
            one.names.resize(kNameBytes);
            one.blocks.resize(1);
            one.columns.resize(1);
            std::future<LoadReport> loading = std::async(
                std::launch::async, [&] { return load(*saved.kv, saved.client, one, 1, nullptr); });
            while (batches() == before) std::this_thread::yield();
            Status closed = saved.kv->close(50);
            REQUIRE_FALSE(closed);
            CHECK(closed.error().code == Code::kTimeout);
            CHECK_FALSE(all_ok(loading.get()));
            saved.kv.reset();
            CHECK(soft_device().soft_calls("cuMemHostUnregister") == released);
            saved.client.close();
            // The session is gone; the copy still finds its memory.
            soft_device().soft_unhang();
            soft_device().soft_settle();
            char text[200];
            CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
        }
        bed.forget();
    }
}

TEST_CASE("device kv: close() with copies from the arena under way") {
    Node node;
    if (is_real()) return;
    each_policy([&](Bed& bed) {
        Saved saved(bed, node.options(), straight(kSmall), 'H');
        CHECK(pin_all(*saved.kv, saved.client).why == "");
        int before = copies();
        std::vector<std::future<LoadReport>> loads;
        for (int i = 0; i < 4; ++i) {
            loads.push_back(std::async(std::launch::async, [&] { return saved.load_all(); }));
        }
        while (copies() == before) std::this_thread::yield();
        REQUIRE(saved.kv->close(20'000));
        for (std::future<LoadReport>& each : loads) CHECK(saved.right(each.get()));
        REQUIRE(saved.client.remove(saved.names));
    });
}

TEST_CASE("device kv: a child of fork() leaves the arena to its parent, whose card reads it") {
    Node node;
    if (is_real()) return;
    Bed bed(Policy::kLate);
    {
        Saved saved(bed, node.options(), straight(kSmall), 'I');
        CHECK(pin_all(*saved.kv, saved.client).why == "");
        int before = batches();
        soft_device().soft_hang(1);
        std::future<LoadReport> loading = std::async(std::launch::async, [&] { return saved.load_all(); });
        while (batches() == before) std::this_thread::yield();
        pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            ::alarm(20);  // a child that waits for the parent's threads is killed
            bool closed = saved.kv->close(1000).ok();
            saved.kv.reset();
            ::_exit(closed ? 0 : 1);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(status == 0);
        soft_device().soft_unhang();
        LoadReport report = loading.get();
        CHECK(all_ok(report));
        CHECK(saved.right(report));
        REQUIRE(saved.client.remove(saved.names));
    }
    bed.end();
}
