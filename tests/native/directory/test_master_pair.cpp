// Two masters over real sockets: what a standby knows, when the owner waits for it, and who serves when one
// is lost. The order of removals across a take-over is the simulator's matter (tests/sim).
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../random.hpp"
#include "directory/mirror.hpp"
#include "server_bed.hpp"
#include "wire/dial.hpp"
#include "wire/error_frame.hpp"

namespace moonpool {
namespace {

using namespace testing;  // NOLINT: the bed is of these tests alone

struct Pair {
    std::unique_ptr<MasterServer> owner, standby;
    std::string addresses;

    // grace_ms: of both; for so long after its start an owner does not hand over.
    explicit Pair(uint32_t take_over_ms = UINT32_MAX, uint32_t grace_ms = 5000) {
        owner = serve("127.0.0.1:0", [&](MasterServerOptions& o) { o.master.grace_ms = grace_ms; });
        const std::string of = owner->addresses()[0];
        standby = serve("127.0.0.1:0", [&](MasterServerOptions& o) {
            o.master.grace_ms = grace_ms;
            o.standby_of = of;
            o.pair.take_over_ms = take_over_ms;
        });
        addresses = of + "," + standby->addresses()[0];
        REQUIRE(until([&] { return owner->standby().is_whole && standby->standby().is_whole; }));
    }
};

// A node that tells both.
struct PairNode {
    FakeNode to_owner, to_standby;
    PairNode(const Pair& pair, const std::string& name)
        : to_owner(pair.owner->addresses()[0], name), to_standby(pair.standby->addresses()[0], name) {}
    void put(uint64_t n) {
        to_owner.put(n);
        to_standby.put(n);
    }
};

uint64_t metric(MasterServer& server, const std::string& name) {
    for (auto& [known, value] : server.snapshot()) {
        if (known == name) return value;
    }
    return 0;
}

// Through all of it; what the master answered to its end.
Result<std::vector<Version>> remove(DirectoryClient& client, uint64_t key) {
    std::vector<Hash128> keys = hashes(key, key + 1);
    Result<OrderAnswer> order = client.order(keys, nullptr);
    if (!order) return order.error();
    OrderDone done{keys, order->versions, order->epoch, {{}}, {{}}};
    return client.ordered(done);
}

TEST_CASE("masters: a standby answers what it knows when its owner is lost, and orders after it took over") {
    Pair pair;
    PairNode node(pair, "a");
    DirectoryClient client(client_options(pair.addresses));
    for (uint64_t n = 1; n <= 300; ++n) node.put(n);
    std::vector<Hash128> keys = hashes(1, 301);
    REQUIRE(until([&] { return hits(client, keys) == 300; }));
    REQUIRE(remove(client, 7));
    REQUIRE(until([&] { return metric(*pair.standby, "directory_rows") == 299; }));
    uint64_t inventories = metric(*pair.standby, "inventories_total");

    pair.owner.reset();
    REQUIRE(until([&] { return pair.standby->role() == MasterRole::kActing; }));
    REQUIRE(until([&] { return hits(client, keys) == 299; }));
    Result<std::vector<Version>> refused = remove(client, 8);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().text.find("moonpool promote") != std::string::npos);
    CHECK(hits(client, keys) == 299);  // the refusal cost no connection

    CHECK(pair.standby->take_over());
    CHECK_FALSE(pair.standby->take_over());
    CHECK(pair.standby->role() == MasterRole::kOwner);
    REQUIRE(remove(client, 8));
    REQUIRE(until([&] { return hits(client, keys) == 298; }));
    CHECK(metric(*pair.standby, "inventories_total") == inventories);
    CHECK(pair.standby->check_integrity());
}

TEST_CASE("masters: clients of a pair find the one that serves, whichever it is") {
    Pair pair(0);
    std::string turned = pair.standby->addresses()[0] + "," + pair.owner->addresses()[0];
    DirectoryClient client(client_options(turned));
    REQUIRE(client.members(true));
    REQUIRE(remove(client, 1));
    pair.owner.reset();
    REQUIRE(until([&] { return pair.standby->role() == MasterRole::kOwner; }));
    REQUIRE(until([&] { return remove(client, 2).ok(); }));
}

// A standby that hears and says nothing.
struct MuteStandby {
    Dialed line;
    explicit MuteStandby(const std::string& owner) {
        DialOptions to;
        to.address = owner;
        to.token = kToken;
        to.service = kServiceStandby;
        Result<Dialed> dialed = dial(to);
        REQUIRE(dialed);
        line = std::move(*dialed);
        std::vector<std::byte> hello;
        size_t at = begin_frame(hello, Kind::kMirror, kFlagOneWay, 0);
        Writer(hello).text16("mute");
        finish_frame(hello, at);
        send(hello);
    }
    void send(const std::vector<std::byte>& bytes) {
        REQUIRE(::send(line.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
                static_cast<ssize_t>(bytes.size()));
    }
    void say(Kind kind, uint64_t number) {
        std::vector<std::byte> out;
        size_t at = begin_frame(out, kind, kFlagOneWay, 0);
        if (kind == Kind::kMirrored) Writer(out).number(number);
        finish_frame(out, at);
        send(out);
    }
    // The next frame's head.
    MirrorHead hear() {
        FrameHeader header;
        REQUIRE(::recv(line.fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
        REQUIRE(header.kind == Kind::kMirror);
        std::vector<std::byte> body(header.length);
        REQUIRE(::recv(line.fd.get(), body.data(), body.size(), MSG_WAITALL) ==
                static_cast<ssize_t>(body.size()));
        Reader r{std::span<const std::byte>(body)};
        return MirrorHead::read(r);
    }
};

TEST_CASE("masters: no removal gets its place before the standby has heard of it") {
    auto owner = serve("127.0.0.1:0", [](MasterServerOptions& o) { o.pair.silent_ms = 60000; });
    const std::string address = owner->addresses()[0];
    MuteStandby standby(address);
    standby.say(Kind::kMirrored, standby.hear().number);
    REQUIRE(until([&] { return owner->standby().is_whole; }));
    DirectoryClientOptions impatient = client_options(address);
    impatient.timeout_ms = 200;
    DirectoryClient client(impatient);
    Result<std::vector<Version>> held = remove(client, 1);
    REQUIRE_FALSE(held);
    CHECK(held.error().code == Code::kTimeout);
    // Once it says that it has, removals go on; its word for later frames is given ahead of each.
    std::thread hears([&] {
        for (;;) {
            FrameHeader header;
            if (::recv(standby.line.fd.get(), &header, sizeof(header), MSG_WAITALL) != sizeof(header)) return;
            std::vector<std::byte> body(header.length);
            if (::recv(standby.line.fd.get(), body.data(), body.size(), MSG_WAITALL) <= 0) return;
            Reader r{std::span<const std::byte>(body)};
            uint64_t number = MirrorHead::read(r).number;
            std::vector<std::byte> out;
            size_t at = begin_frame(out, Kind::kMirrored, kFlagOneWay, 0);
            Writer(out).number(number);
            finish_frame(out, at);
            if (::send(standby.line.fd.get(), out.data(), out.size(), MSG_NOSIGNAL) < 0) return;
        }
    });
    bool went_on = until([&] { return remove(client, 2).ok(); });
    ::shutdown(standby.line.fd.get(), SHUT_RDWR);
    hears.join();
    CHECK(went_on);
}

// Several questions of one connection, as a node passes them on for its processes.
TEST_CASE("masters: what waits for the standby holds up no other question, and is refused by itself") {
    auto owner = serve("127.0.0.1:0", [](MasterServerOptions& o) { o.pair.silent_ms = 60000; });
    const std::string address = owner->addresses()[0];
    auto standby = std::make_unique<MuteStandby>(address);
    standby->say(Kind::kMirrored, standby->hear().number);
    REQUIRE(until([&] { return owner->standby().is_whole; }));
    DialOptions to;
    to.address = address;
    to.token = kToken;
    to.service = kServiceDirectory;
    Result<Dialed> line = dial(to);
    REQUIRE(line);
    std::vector<std::byte> out;
    auto ask = [&](Kind kind, uint64_t id, const std::function<void(Writer&)>& build) {
        size_t at = begin_frame(out, kind, 0, id);
        Writer w(out);
        build(w);
        finish_frame(out, at);
    };
    auto locate = [&](uint64_t id, uint8_t flags) {
        ask(Kind::kLocate, id, [&](Writer& w) {
            LocateHead{.flags = flags, .width = 0, .n = 1}.write(w);
            write_hash(w, hash_of(id));
        });
    };
    locate(1, kLocateSuspects | kLocateOrder);
    locate(2, 0);
    locate(3, kLocateSuspects | kLocateOrder);
    ask(Kind::kMembers, 4, [](Writer& w) { w.number(uint64_t{0}); });
    REQUIRE(::send(line->fd.get(), out.data(), out.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(out.size()));
    auto next = [&] {
        FrameHeader header;
        REQUIRE(::recv(line->fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
        std::vector<std::byte> body(header.length);
        REQUIRE(::recv(line->fd.get(), body.data(), body.size(), MSG_WAITALL) ==
                static_cast<ssize_t>(body.size()));
        return header;
    };
    CHECK(next().request_id == 2);
    CHECK(next().request_id == 4);
    standby.reset();
    for (uint64_t id : {1, 3}) {
        FrameHeader header = next();
        CHECK(header.kind == Kind::kError);
        CHECK(header.request_id == id);
    }
    out.clear();
    locate(5, 0);
    REQUIRE(::send(line->fd.get(), out.data(), out.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(out.size()));
    CHECK(next().request_id == 5);
}

TEST_CASE("masters: an owner whose standby is lost orders nothing until it hears that there is none") {
    auto owner = serve();
    const std::string address = owner->addresses()[0];
    DirectoryClient client(client_options(address));
    {
        MuteStandby standby(address);
        standby.say(Kind::kMirrored, standby.hear().number);
        REQUIRE(until([&] { return owner->standby().is_whole; }));
    }
    REQUIRE(until([&] { return !owner->standby().attached; }));
    Result<std::vector<Version>> refused = remove(client, 1);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().text.find("standby of the master is lost") != std::string::npos);
    CHECK(owner->take_over());
    CHECK(remove(client, 1));
}

TEST_CASE("masters: an owner goes on alone when its standby says that it leaves") {
    auto owner = serve();
    const std::string address = owner->addresses()[0];
    DirectoryClient client(client_options(address));
    SUBCASE("by the frame") {
        MuteStandby standby(address);
        standby.say(Kind::kMirrored, standby.hear().number);
        REQUIRE(until([&] { return owner->standby().is_whole; }));
        standby.say(Kind::kLeave, 0);
    }
    SUBCASE("as a standby that is stopped does") {
        auto standby = serve("127.0.0.1:0", [&](MasterServerOptions& o) { o.standby_of = address; });
        REQUIRE(until([&] { return owner->standby().is_whole; }));
        standby->stop();
    }
    REQUIRE(until([&] { return !owner->standby().attached; }));
    Result<std::vector<Version>> removed = remove(client, 1);
    CHECK_MESSAGE(removed.ok(), (removed.ok() ? "" : removed.error().text));
}

TEST_CASE("masters: each says what it is, also one that serves no clients") {
    Pair pair;
    PairNode node(pair, "a");
    node.put(1);
    auto ask = [](const MasterServer& server, const char* token) {
        DialOptions to;
        to.address = server.addresses()[0];
        to.token = token;
        return ask_master_state(std::move(to));
    };
    auto state_of = [&](const MasterServer& server) {
        Result<MasterState> state = ask(server, kToken);
        if (!state) FAIL(state.error().text);
        return *state;
    };
    REQUIRE(until([&] { return state_of(*pair.owner).rows == 1 && state_of(*pair.owner).is_whole; }));
    MasterState owner = state_of(*pair.owner);
    CHECK(owner.role == MasterRole::kOwner);
    CHECK(owner.attached);
    CHECK(owner.nodes == 1);
    REQUIRE(until([&] { return state_of(*pair.standby).rows == 1; }));
    MasterState standby = state_of(*pair.standby);
    CHECK(standby.role == MasterRole::kStandby);
    CHECK(standby.other == pair.owner->addresses()[0]);
    CHECK(standby.is_whole);
    REQUIRE(pair.standby->take_over());
    CHECK(until([&] { return state_of(*pair.standby).role == MasterRole::kOwner; }));
    CHECK_FALSE(ask(*pair.owner, "another"));
}

TEST_CASE("masters: an owner serves no longer when a node has heard of a later one") {
    Pair pair;
    PairNode node(pair, "a");
    DirectoryClient client(client_options(pair.addresses));
    node.put(1);
    std::vector<Hash128> keys = hashes(1, 2);
    REQUIRE(until([&] { return hits(client, keys) == 1; }));
    REQUIRE(pair.standby->take_over());
    // The node tells each what it has heard of the other.
    REQUIRE(until([&] {
        node.to_owner.set_applied(node.to_standby.applied());
        return pair.owner->role() == MasterRole::kSuperseded;
    }));
    REQUIRE(until([&] { return remove(client, 2).ok(); }));
    CHECK(until([&] { return hits(client, keys) == 1; }));
    // A client that knows this one alone is sent to the master that was its standby.
    DirectoryClient fresh(client_options(pair.owner->addresses().front()));
    CHECK(until([&] { return hits(fresh, keys) == 1; }));
}

// Clients that ask all the time, each with a connection of its own.
struct Askers {
    std::atomic<bool> ends{false};
    std::atomic<uint64_t> done{0}, failed{0};
    std::string why;  // of the first that failed
    std::mutex mutex;
    std::vector<std::thread> threads;

    explicit Askers(const std::string& addresses) {
        for (uint64_t i = 0; i < 3; ++i) threads.emplace_back([this, addresses, i] { ask(addresses, i); });
    }
    ~Askers() {
        ends = true;
        for (std::thread& thread : threads) thread.join();
    }
    void ask(const std::string& addresses, uint64_t i) {
        DirectoryClient client(client_options(addresses));
        std::vector<Hash128> keys = hashes(1, 11);
        for (uint64_t key = 1000 * (i + 1); !ends; ++key) {
            Result<std::vector<Version>> removed = remove(client, key);
            Result<LocateAnswer> located = client.locate(keys);
            ++done;
            if (removed && located) continue;
            std::lock_guard lock(mutex);
            if (failed++ == 0) why = (removed ? located.error() : removed.error()).text;
        }
    }
};

constexpr uint32_t kGraceMs = 100;

TEST_CASE("masters: an owner hands over to its standby and back, and no call of a client fails") {
    Pair pair(UINT32_MAX, kGraceMs);
    PairNode node(pair, "a");
    for (uint64_t n = 1; n <= 10; ++n) node.put(n);
    DirectoryClient idle(client_options(pair.addresses));
    REQUIRE(until([&] { return hits(idle, hashes(1, 11)) == 10; }));
    REQUIRE(until([&] { return metric(*pair.standby, "directory_rows") == 10; }));
    uint64_t inventories = metric(*pair.standby, "inventories_total");
    Askers askers(pair.addresses);
    REQUIRE(until([&] { return askers.done > 20; }));
    Status status = pair.standby->ask_hand_over(10000);
    if (!status) FAIL(status.error().text);
    CHECK(pair.standby->role() == MasterRole::kOwner);
    CHECK(hits(idle, hashes(1, 11)) == 10);  // its connection has ended between two calls
    CHECK(metric(*pair.standby, "inventories_total") == inventories);
    REQUIRE(until([&] { return pair.owner->standby().is_whole; }));
    CHECK(pair.owner->role() == MasterRole::kStandby);
    REQUIRE(until([&] { return node.to_owner.agent().state().joined; }));
    const uint64_t done = askers.done;
    REQUIRE(until([&] { return askers.done > done + 20; }));
    // It asks until nodes have told it all.
    REQUIRE(pair.owner->ask_hand_over(10000));
    CHECK(pair.owner->role() == MasterRole::kOwner);
    REQUIRE(until([&] { return pair.standby->standby().is_whole; }));
    CHECK(hits(idle, hashes(1, 11)) == 10);
    REQUIRE(remove(idle, 5));
    CHECK(until([&] { return hits(idle, hashes(1, 11)) == 9; }));
    CHECK(askers.failed == 0);
    CHECK(askers.why == "");
    CHECK(pair.owner->check_integrity());
    CHECK(pair.standby->check_integrity());
}

TEST_CASE(
    "masters: an owner does not hand over to a standby that knows fewer nodes, nor to one that is none") {
    Pair pair(UINT32_MAX, kGraceMs);
    FakeNode lone(pair.owner->addresses()[0], "lone");
    REQUIRE(until([&] { return lone.agent().state().joined; }));
    Status status = success();
    CHECK(until([&] {
        status = pair.standby->ask_hand_over(1000);
        return !status && status.error().text.find("of 1 nodes 0 have told the standby") == 0;
    }));
    CHECK(pair.owner->role() == MasterRole::kOwner);
    CHECK_FALSE(pair.owner->ask_hand_over(100));
    DirectoryClient client(client_options(pair.addresses));
    CHECK(remove(client, 1));
}

TEST_CASE("masters: an owner that is new does not hand over, as it may not have heard of all removals") {
    Pair pair(UINT32_MAX, 600'000);
    Status status = success();
    CHECK(until([&] {
        status = pair.standby->ask_hand_over(1000);
        return !status && status.error().text.find("nodes that know of removals by a former master") == 0;
    }));
    CHECK(pair.owner->role() == MasterRole::kOwner);
    DirectoryClient client(client_options(pair.addresses));
    CHECK(remove(client, 1));
}

TEST_CASE("masters: a removal whose client has ended keeps no hand-over") {
    Pair pair(UINT32_MAX, kGraceMs);
    DirectoryClient client(client_options(pair.addresses));
    REQUIRE(client.order(hashes(1, 2), nullptr));
    REQUIRE(pair.standby->ask_hand_over(10000));
    CHECK(pair.standby->role() == MasterRole::kOwner);
    CHECK(remove(client, 1));
}

// The election's part is done by the test: the owner is asked to give, and gives or keeps its place.
TEST_CASE("masters: an elected owner hands over when the election has entered its standby, or goes on") {
    auto elected = [](const char* name) {
        return serve("127.0.0.1:0", [&](MasterServerOptions& o) {
            o.elected = true;
            o.name = name;
            o.master.grace_ms = 0;
        });
    };
    auto owner = elected("one"), standby = elected("two");
    REQUIRE(owner->take_over());
    REQUIRE(standby->follow(owner->addresses()[0]));
    REQUIRE(until([&] { return owner->standby().is_whole && standby->standby().is_whole; }));
    const std::string addresses = owner->addresses()[0] + "," + standby->addresses()[0];
    CHECK(owner->gives_to() == "");
    CHECK_FALSE(owner->give());
    CHECK_FALSE(owner->keep());
    Askers askers(addresses);
    REQUIRE(until([&] { return askers.done > 5; }));
    std::thread asks([&] { (void)standby->ask_hand_over(100); });
    bool gives = until([&] { return owner->gives_to() == "two"; });
    asks.join();
    REQUIRE(gives);
    CHECK(owner->keep());
    uint64_t done = askers.done;
    CHECK(until([&] { return askers.done > done + 5; }));
    CHECK(owner->role() == MasterRole::kOwner);
    // Kept by itself, too, where the election says nothing.
    CHECK_FALSE(standby->ask_hand_over(100));
    CHECK(until([&] { return owner->gives_to() == "two"; }));
    CHECK(until([&] { return owner->gives_to() == ""; }));
    done = askers.done;
    CHECK(until([&] { return askers.done > done + 5; }));
    CHECK_FALSE(standby->ask_hand_over(100));
    REQUIRE(until([&] { return owner->gives_to() == "two"; }));
    CHECK(owner->give());
    CHECK(until([&] { return standby->role() == MasterRole::kOwner; }));
    CHECK(until([&] { return owner->role() == MasterRole::kSuperseded; }));
    REQUIRE(owner->follow(standby->addresses()[0]));
    CHECK(until([&] { return owner->standby().is_whole; }));
    done = askers.done;
    CHECK(until([&] { return askers.done > done + 5; }));
    CHECK(askers.failed == 0);
    CHECK(askers.why == "");
}

TEST_CASE("masters: an elected owner acknowledges no removal by a standby that the election does not name") {
    auto owner = serve("127.0.0.1:0", [](MasterServerOptions& o) { o.elected = true; });
    REQUIRE(owner->take_over());
    REQUIRE(owner->set_elected_standby("one"));
    auto standby = serve("127.0.0.1:0", [&](MasterServerOptions& o) {
        o.elected = true;
        o.name = "two";
    });
    REQUIRE(standby->follow(owner->addresses()[0]));
    REQUIRE(until([&] { return owner->standby().is_whole; }));
    DirectoryClientOptions options = client_options(owner->addresses()[0]);
    options.timeout_ms = 200;
    DirectoryClient client(options);
    CHECK_FALSE(remove(client, 1));
    REQUIRE(owner->set_elected_standby(std::nullopt));
    CHECK_FALSE(remove(client, 2));
    REQUIRE(owner->set_elected_standby("two"));
    CHECK(until([&] { return remove(client, 3).ok(); }));
    REQUIRE(owner->set_elected_standby(""));
    CHECK(until([&] { return remove(client, 4).ok(); }));
}

TEST_CASE("masters: an owner whose standby the election does not name for long refuses, also what waits") {
    auto owner = serve("127.0.0.1:0", [](MasterServerOptions& o) { o.elected = true; });
    REQUIRE(owner->take_over());
    REQUIRE(owner->set_elected_standby("one"));
    auto standby = serve("127.0.0.1:0", [&](MasterServerOptions& o) {
        o.elected = true;
        o.name = "two";
    });
    REQUIRE(standby->follow(owner->addresses()[0]));
    REQUIRE(until([&] { return owner->standby().is_whole; }));
    DirectoryClientOptions options = client_options(owner->addresses()[0]);
    options.timeout_ms = 10000;  // the answer comes before
    DirectoryClient client(options);
    for (int i = 0; i < 2; ++i) {  // the first one waits, the other is refused at once
        Result<std::vector<Version>> status = remove(client, 1);
        REQUIRE_FALSE(status);
        CHECK(status.error().code == Code::kUnavailable);
        CHECK(status.error().text.find("the election does not name the standby") != std::string::npos);
    }
    CHECK(client.members(true).ok());  // over the same connection
    REQUIRE(owner->set_elected_standby("two"));
    CHECK(remove(client, 2).ok());
}

TEST_CASE("masters: an owner acknowledges nothing behind the time for which it is the owner") {
    Master master(MasterLimits{}, 0, first_version(1000));
    MasterPair pair(master, {}, 0);
    CHECK(pair.is_heard(pair.word(), 1'000'000));
    pair.set_valid_until(10);
    CHECK(pair.is_heard(pair.word(), 9));
    CHECK_FALSE(pair.is_heard(pair.word(), 10));
}

TEST_CASE("masters: a standby that is told nonsense asks for all again") {
    auto owner = serve();
    DialOptions to;
    to.address = owner->addresses()[0];
    to.token = kToken;
    to.service = kServiceStandby;
    for (Kind kind : {Kind::kMirrored, Kind::kLocate, Kind::kJoin}) {
        Result<Dialed> dialed = dial(to);
        REQUIRE(dialed);
        std::vector<std::byte> out;
        size_t at = begin_frame(out, kind, kFlagOneWay, 0);
        Writer(out).number(uint64_t{12345});
        finish_frame(out, at);
        REQUIRE(::send(dialed->fd.get(), out.data(), out.size(), MSG_NOSIGNAL) > 0);
        FrameHeader header;
        REQUIRE(::recv(dialed->fd.get(), &header, sizeof(header), MSG_WAITALL) == sizeof(header));
        CHECK(header.kind == Kind::kError);
    }
    CHECK(owner->check_integrity());
}

// The frames of an owner with removals that are open, ended and placed, without their headers.
std::vector<std::vector<std::byte>> mirror_frames() {
    Master owner(MasterLimits{}, 0, first_version(1000));
    NodeIdentity who;
    who.name = "a";
    who.host_id = "h";
    who.incarnation.fill(1);
    NodeId node = owner.join(0, who, {}, 1, UINT64_MAX)->id;
    std::vector<std::vector<std::byte>> frames;
    auto cut = [&](uint8_t flags) {
        std::vector<std::byte> out;
        owner.mirror().cut(0, owner.mirror_head(flags), out);
        frames.emplace_back(out.begin() + sizeof(FrameHeader), out.end());
    };
    auto order = [&](const std::vector<Hash128>& keys, bool ends) {
        std::string_view bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(Hash128));
        std::vector<std::byte> out;
        Writer w(out);
        Version first = owner.order(0, bytes, node, w);
        std::string bits(keys.size(), '\1');
        if (ends) owner.ordered(0, Ordered{first, owner.membership().epoch(), {node}, bytes, bits, bits}, w);
    };
    order(hashes(0, 5), true);
    order(hashes(5, 9), false);
    owner.begin_mirror(cut);
    order(hashes(9, 12), true);
    order(hashes(12, 13), false);
    cut(kMirrorWhole);
    return frames;
}

TEST_CASE(
    "masters: a standby that followed for a moment is filling when it takes over, unless all nodes told it") {
    MasterLimits limits;
    limits.grace_ms = 2000;
    for (bool all_told : {false, true}) {
        Master standby(limits, 0, first_version(1000));
        standby.begin_to_follow(10000);
        for (const std::vector<std::byte>& frame : mirror_frames())
            REQUIRE(standby.follow(10001, Reader(std::span<const std::byte>(frame))));
        standby.take_over(10002, first_version(2000), all_told);
        CHECK(standby.filling(10003) == !all_told);
        CHECK_FALSE(standby.filling(12001));
    }
}

// Its owner was restarted, and lost before the node had joined it.
TEST_CASE("masters: a standby takes over with the removals that a node told it while its owner was new") {
    const Version removed = first_version(500);
    const std::vector<Drop> log{{hashes(100, 101)[0], removed}};
    auto applied_after = [&](uint64_t told_at_ms) {
        Master standby(MasterLimits{}, 0, first_version(1000));
        standby.begin_to_follow(10000);
        for (const std::vector<std::byte>& frame : mirror_frames())
            REQUIRE(standby.follow(10001, Reader(std::span<const std::byte>(frame))));
        NodeIdentity knows, behind;
        knows.name = "knows", behind.name = "behind";
        knows.host_id = behind.host_id = "h";
        knows.incarnation.fill(2), behind.incarnation.fill(3);
        NodeId id = standby.join(told_at_ms, knows, {}, 2, removed)->id;
        standby.removals(told_at_ms, id, 2, kNoVersion, log);
        standby.tick(told_at_ms);
        standby.take_over(told_at_ms + 1, first_version(2000), false);
        NodeId late = standby.join(told_at_ms + 2, behind, {}, 3, first_version(400))->id;
        CHECK(standby.check_integrity());
        return standby.drops(late).items();
    };
    auto names_it = [&](const std::deque<Drop>& drops) {
        return std::ranges::any_of(drops, [&](const Drop& drop) { return drop.hash == log[0].hash; });
    };
    CHECK(names_it(applied_after(10002)));
    CHECK_FALSE(names_it(applied_after(20000)));  // by then the owner knows, and the standby by its frames
}

TEST_CASE("masters: a standby follows damaged frames to no harm") {
    const std::vector<std::vector<std::byte>> sound = mirror_frames();
    REQUIRE(sound.size() == 2);
    Random random(20261128);
    INFO("seed 20261128");
    size_t followed = 0;
    for (int round = 0; round < 3000; ++round) {
        Master standby(MasterLimits{}, 0, first_version(1000));
        standby.begin_to_follow(0);
        for (std::vector<std::byte> frame : sound) {
            for (uint64_t i = random.below(3); i > 0; --i)
                frame[random.below(frame.size())] = static_cast<std::byte>(random.below(256));
            if (random.one_in(4)) frame.resize(random.below(frame.size()));
            if (!standby.follow(1, Reader(std::span<const std::byte>(frame)))) break;
            ++followed;
        }
        REQUIRE(standby.check_integrity());
        if (random.one_in(2)) {
            standby.take_over(2, first_version(2000), false);
            standby.tick(10000);
            REQUIRE(standby.check_integrity());
        }
    }
    CHECK(followed > 1000);
}

}  // namespace
}  // namespace moonpool
