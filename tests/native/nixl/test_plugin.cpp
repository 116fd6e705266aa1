// The NIXL plugin, driven as NIXL drives it, through the classes of abi.hpp, without NIXL: two agents of one
// process. tests/nixl has NIXL's own.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../device/bed.hpp"
#include "base/fd.hpp"
#include "engine/engine.hpp"
#include "nixl/abi.hpp"
#include "nixl/host.hpp"
#include "nixl/plugin.hpp"

using namespace moonpool;

namespace {

NixlPlugin* plugin() {
    static NixlPlugin* made = moonpool::nixl::plugin_for(success());
    return made;
}

constexpr int kAll = -1;

struct Agent {
    explicit Agent(const std::string& name, const std::string& listen = "127.0.0.1:0") : memory(1 << 16) {
        ::setenv("MOONPOOL_CLUSTER_TOKEN", "of this test", 1);
        NixlParams params{{"listen", listen}};
        NixlSetup setup{name, "MOONPOOL", &params};
        engine = plugin()->create(&setup);
        ::unsetenv("MOONPOOL_CLUSTER_TOKEN");
        REQUIRE(engine->connection_info(address) == kNixlSuccess);
        NixlNamedRange range{{start(), memory.size(), 0}, ""};
        REQUIRE(engine->register_memory(range, kNixlDram, here) == kNixlSuccess);
        REQUIRE(engine->load_remote(range, kNixlDram, name, there) == kNixlSuccess);
    }
    ~Agent() {
        CHECK(engine->unload(there) == kNixlSuccess);
        CHECK(engine->deregister_memory(here) == kNixlSuccess);
        plugin()->destroy(engine);
    }
    Agent(const Agent&) = delete;

    uintptr_t start() const { return reinterpret_cast<uintptr_t>(memory.data()); }
    // Of a quarter of the memory, or of all of it.
    NixlRanges ranges(NixlMetadata* metadata, size_t pieces, int quarter = kAll) const {
        NixlRanges found;
        found.memory = kNixlDram;
        size_t begin = quarter == kAll ? 0 : memory.size() / 4 * static_cast<size_t>(quarter);
        size_t each = memory.size() / (quarter == kAll ? 1 : 4) / pieces;
        for (size_t i = 0; i < pieces; ++i) {
            NixlLocatedRange one;
            one.address = start() + begin + i * each;
            one.length = each;
            one.device = 0;
            one.metadata = metadata;
            found.items.push_back(one);
        }
        return found;
    }

    std::vector<unsigned char> memory;
    NixlEngine* engine = nullptr;
    NixlMetadata *here = nullptr, *there = nullptr;
    std::string address;
};

NixlStatus write(Agent& from, const std::string& name, const Agent& to, size_t pieces,
                 const std::string& message = "", int quarter = kAll) {
    NixlRanges local = from.ranges(from.here, pieces, quarter);
    NixlRanges remote = to.ranges(to.there, pieces, quarter);
    NixlOptions options;
    options.has_message = !message.empty();
    options.message = message;
    NixlRequest* request = nullptr;
    REQUIRE(from.engine->prepare(kNixlWrite, local, remote, name, request, &options) == kNixlSuccess);
    NixlStatus status = from.engine->post(kNixlWrite, local, remote, name, request, &options);
    while (status == kNixlInProgress) {
        status = from.engine->check(request);
        std::this_thread::yield();
    }
    CHECK(from.engine->check(request) == status);
    CHECK(from.engine->release(request) == kNixlSuccess);
    return status;
}

}  // namespace

TEST_CASE("nixl: bytes and messages of several threads") {
    Agent one("one"), other("other");
    for (size_t at = 0; at < one.memory.size(); ++at)
        one.memory[at] = static_cast<unsigned char>(at % 251 + 1);
    CHECK(one.engine->load_connection("other", other.address) == kNixlSuccess);
    std::vector<std::thread> threads;
    std::vector<NixlStatus> ends(4);
    for (int i = 0; i < 4; ++i) {  // each its own bytes: two that write the same at once are a race
        threads.emplace_back([&, i] { ends[i] = write(one, "other", other, 1u << (2 * i), "written", i); });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(ends == std::vector<NixlStatus>(4, kNixlSuccess));
    CHECK(one.memory == other.memory);
    CHECK(one.engine->send_message("other", "by itself") == kNixlSuccess);
    NixlMessages heard;
    while (heard.size() < 5) {
        REQUIRE(other.engine->messages(heard) == kNixlSuccess);
        std::this_thread::yield();
    }
    size_t written = 0;
    for (const auto& [name, text] : heard) {
        CHECK(name == "one");
        written += text == "written";
    }
    CHECK(written == 4);
    CHECK(write(one, "nobody", other, 1) == kNixlDisconnected);
    CHECK(one.engine->disconnect("other") == kNixlSuccess);
    CHECK(one.engine->disconnect("other") == kNixlNotFound);
    CHECK(write(one, "one", one, 2) == kNixlSuccess);
    CHECK(one.engine->disconnect("one") == kNixlSuccess);
    CHECK(write(one, "one", one, 2) == kNixlSuccess);  // and is met anew
}

TEST_CASE("nixl: memory of a card is VRAM_SEG, and its driver says what is") {
    moonpool::testing::Bed bed;
    {
        constexpr size_t kBytes = 1 << 16;
        Agent one("one"), other("other");
        CHECK(one.engine->memories() == std::vector<NixlMemory>{kNixlDram, kNixlVram});
        auto card = device::must(device::DeviceMemory::allocate(bed.device, kBytes));
        NixlNamedRange range{{static_cast<uintptr_t>(card.address()), kBytes, 0}, ""};
        NixlMetadata *here = nullptr, *there = nullptr;
        CHECK(other.engine->register_memory(range, kNixlDram, here) == kNixlInvalid);
        NixlNamedRange host{{one.start(), one.memory.size(), 0}, ""};
        NixlMetadata* none = nullptr;
        CHECK(other.engine->register_memory(host, kNixlVram, none) == kNixlInvalid);
        REQUIRE(other.engine->register_memory(range, kNixlVram, here) == kNixlSuccess);
        REQUIRE(one.engine->load_remote(range, kNixlVram, "other", there) == kNixlSuccess);
        REQUIRE(one.engine->load_connection("other", other.address) == kNixlSuccess);
        for (size_t at = 0; at < kBytes; ++at) one.memory[at] = static_cast<unsigned char>(at % 251 + 1);
        NixlRanges local = one.ranges(one.here, 4), remote = local;
        remote.memory = kNixlVram;
        for (size_t i = 0; i < remote.items.size(); ++i) {
            remote.items[i].address = card.address() + i * remote.items[i].length;
            remote.items[i].metadata = there;
        }
        NixlRequest* request = nullptr;
        NixlOptions options;
        REQUIRE(one.engine->prepare(kNixlWrite, local, remote, "other", request, &options) == kNixlSuccess);
        NixlStatus status = one.engine->post(kNixlWrite, local, remote, "other", request, &options);
        while (status == kNixlInProgress) {
            status = one.engine->check(request);
            std::this_thread::yield();
        }
        CHECK(status == kNixlSuccess);
        CHECK(one.engine->release(request) == kNixlSuccess);
        CHECK(std::memcmp(moonpool::testing::soft_device().soft_at(card.address(), kBytes), one.memory.data(),
                          kBytes) == 0);
        CHECK(one.engine->unload(there) == kNixlSuccess);
        CHECK(other.engine->deregister_memory(here) == kNixlSuccess);
    }
    bed.end();
}

TEST_CASE("nixl: a transfer that failed is in progress until the card has ended its copies") {
    moonpool::testing::Bed bed;
    {
        constexpr size_t kBytes = 1 << 16;
        Agent one("one"), other("other");
        auto card = device::must(device::DeviceMemory::allocate(bed.device, kBytes));
        NixlNamedRange range{{static_cast<uintptr_t>(card.address()), kBytes, 0}, ""};
        NixlMetadata* here = nullptr;
        REQUIRE(one.engine->register_memory(range, kNixlVram, here) == kNixlSuccess);
        REQUIRE(one.engine->load_connection("other", other.address) == kNixlSuccess);
        NixlRanges remote = other.ranges(other.there, 1), local = remote;
        local.memory = kNixlVram;
        local.items[0].address = card.address();
        local.items[0].metadata = here;
        NixlRequest* request = nullptr;
        REQUIRE(one.engine->prepare(kNixlRead, local, remote, "other", request, nullptr) == kNixlSuccess);
        moonpool::testing::soft_device().soft_hang(1);
        NixlStatus status = one.engine->post(kNixlRead, local, remote, "other", request, nullptr);
        // The engine gives up, and the copy hangs on.
        auto until = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(moonpool::EngineOptions{}.timeout_ms + 2000);
        while (status == kNixlInProgress && std::chrono::steady_clock::now() < until) {
            status = one.engine->check(request);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        CHECK(status == kNixlInProgress);
        CHECK(one.engine->release(request) == kNixlBackendError);
        moonpool::testing::soft_device().soft_unhang();
        while (status == kNixlInProgress) status = one.engine->check(request);
        CHECK(status == kNixlDisconnected);
        CHECK(one.engine->release(request) == kNixlSuccess);
        CHECK(one.engine->deregister_memory(here) == kNixlSuccess);
    }
    bed.end();
}

TEST_CASE("nixl: another process at the same address is met, whether or not its metadata came") {
    Agent one("one");
    auto other = std::make_unique<Agent>("other");
    std::string address = other->address;
    CHECK(one.engine->load_connection("other", address) == kNixlSuccess);
    CHECK(write(one, "other", *other, 1) == kNixlSuccess);
    other.reset();
    other = std::make_unique<Agent>("other", address);
    CHECK(one.engine->load_connection("other", address) == kNixlSuccess);
    CHECK(write(one, "other", *other, 1) == kNixlSuccess);
    other.reset();
    other = std::make_unique<Agent>("other", address);
    CHECK(write(one, "other", *other, 1) == kNixlDisconnected);
    CHECK(write(one, "other", *other, 1) == kNixlSuccess);
}

TEST_CASE("nixl: a transfer of memory that is not there does not end the connection that others use") {
    Agent one("one");
    auto other = std::make_unique<Agent>("other");
    CHECK(one.engine->load_connection("other", other->address) == kNixlSuccess);
    CHECK(write(one, "other", one, 1) == kNixlDisconnected);  // that memory is not other's
    CHECK(write(one, "other", *other, 1) == kNixlSuccess);
    CHECK(write(one, "other", one, 1) == kNixlDisconnected);
    other.reset();
    CHECK(one.engine->connect("other") == kNixlSuccess);  // nobody has to be dialled
}

TEST_CASE("nixl: a peer that hangs stops nobody else") {
    Agent one("one"), other("other");
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(place);
    REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&place), size) == 0);
    REQUIRE(::listen(listener.get(), 1) == 0);
    REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&place), &size) == 0);
    std::string address = "127.0.0.1:" + std::to_string(ntohs(place.sin_port));
    CHECK(one.engine->load_connection("hung", address) == kNixlSuccess);
    CHECK(one.engine->load_connection("other", other.address) == kNixlSuccess);
    std::atomic<bool> ended{false};
    std::thread caller([&] {
        CHECK(one.engine->connect("hung") == kNixlDisconnected);
        ended = true;
    });
    Fd dialled(::accept(listener.get(), nullptr, nullptr));  // and says nothing
    REQUIRE(dialled.valid());
    CHECK(write(one, "other", other, 1) == kNixlSuccess);
    CHECK_FALSE(ended);
    dialled.reset();
    listener.reset();
    caller.join();
}

TEST_CASE("nixl: a transfer of nothing, posted where another failed, has not failed") {
    Agent one("one"), other("other");
    NixlRanges none;
    none.memory = kNixlDram;
    NixlRanges local = one.ranges(one.here, 1), remote = other.ranges(other.there, 1);
    NixlRequest* request = nullptr;
    REQUIRE(one.engine->prepare(kNixlRead, local, remote, "other", request, nullptr) == kNixlSuccess);
    CHECK(one.engine->post(kNixlRead, local, remote, "other", request, nullptr) == kNixlDisconnected);
    CHECK(one.engine->check(request) == kNixlDisconnected);
    CHECK(one.engine->load_connection("other", other.address) == kNixlSuccess);
    CHECK(one.engine->post(kNixlRead, none, none, "other", request, nullptr) == kNixlSuccess);
    CHECK(one.engine->check(request) == kNixlSuccess);
    CHECK(one.engine->post(kNixlRead, local, none, "other", request, nullptr) == kNixlInvalid);
    CHECK(one.engine->check(request) == kNixlInvalid);
    CHECK(one.engine->release(request) == kNixlSuccess);
}

TEST_CASE("nixl: who cannot be made is broken, and what differs from the interface is refused") {
    NixlParams params{{"listen", "no address"}};
    ::setenv("MOONPOOL_CLUSTER_TOKEN", "of this test", 1);
    NixlSetup setup{"wrong", "MOONPOOL", &params};
    plugin()->destroy(plugin()->create(&setup));
    ::unsetenv("MOONPOOL_CLUSTER_TOKEN");

    CHECK_FALSE(moonpool::nixl::check_loaded());  // there is none in this program
    std::set<std::string> asked;
    CHECK(moonpool::nixl::check_interface([&](const char* name) {
        bool is_of_another = std::string(name).find("Gpu") != std::string::npos;
        if (!is_of_another) asked.insert(name);
        return !is_of_another;
    }));
    CHECK(asked.size() == 9);
    for (const std::string& gone : asked) {
        CHECK_FALSE(moonpool::nixl::check_interface(
            [&](const char* name) { return asked.contains(name) && gone != name; }));
    }
    Status more = moonpool::nixl::check_interface([](const char*) { return true; });
    REQUIRE_FALSE(more);
    CHECK(moonpool::nixl::plugin_for(more) == nullptr);
}
