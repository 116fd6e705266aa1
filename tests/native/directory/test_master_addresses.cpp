// Where the masters are: what a process remembers of it, what it refuses, and whom it believes.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <cstring>

#include "base/wait_budget.hpp"
#include "directory/known_masters.hpp"
#include "directory/master_addresses.hpp"
#include "directory/master_claims.hpp"
#include "server_bed.hpp"
#include "wire/dial.hpp"
#include "wire/error_frame.hpp"
#include "wire/listener.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

using Addresses = std::vector<std::string>;

std::string at(int i) { return "10.0.0." + std::to_string(i) + ":7700"; }

MasterList list_of(Version term, Addresses addresses, bool of_owner = true) {
    return {.term = term, .of_owner = of_owner, .addresses = std::move(addresses)};
}

std::vector<std::byte> bytes_of(const MasterList& list) {
    std::vector<std::byte> out;
    list.write(Writer(out));
    return out;
}

bool reads(std::span<const std::byte> bytes) {
    Reader r(bytes);
    return MasterList().read(r);
}

std::unique_ptr<MasterServer> follow(MasterServer& owner) {
    auto standby = serve(
        "127.0.0.1:0", [&](MasterServerOptions& options) { options.standby_of = owner.addresses().front(); });
    REQUIRE(until([&] { return owner.standby().is_whole; }));
    return standby;
}

std::unique_ptr<Listener> listen(const std::string& token, const Service& service) {
    ListenerOptions options;
    options.addresses = {"127.0.0.1:0"};
    options.token = token.c_str();
    Result<std::unique_ptr<Listener>> listener = Listener::create(std::move(options));
    if (!listener) FAIL(listener.error().text);
    (*listener)->offer(std::string(kServiceDirectory), service);
    REQUIRE((*listener)->start());
    return std::move(*listener);
}

DialOptions dialing(const std::string& token = kToken) {
    DialOptions to;
    to.token = token.c_str();
    to.service = kServiceDirectory;
    return to;
}

}  // namespace

TEST_CASE("masters: an address is one that another process may dial, and no list of several") {
    for (const char* good : {"10.0.0.1:7700", "[fd00::7]:7700", "master-0.masters:1", "h:65535"})
        CHECK(is_master_address(good));
    for (const char* bad : {"",
                            "h",
                            "h:",
                            ":7700",
                            "h:0",
                            "h:65536",
                            "h:70000000000",
                            "h:7a",
                            "h:-1",
                            "a,b:1",
                            "a;b:1",
                            "a b:1",
                            "a\n:1",
                            "0.0.0.0:7700",
                            "[::]:7700",
                            "\xc3\xa9:7700",
                            "0:7700",
                            "0.0:7700",
                            "[::0]:7700",
                            "[0:0:0:0:0:0:0:0]:7700",
                            "[::ffff:0.0.0.0]:7700",
                            "224.0.0.1:7700",
                            "255.255.255.255:7700",
                            "[ff02::1]:7700"})
        CHECK_MESSAGE(!is_master_address(bad), bad);
    CHECK(!is_master_address(std::string(300, 'a') + ":7700"));
}

TEST_CASE("masters: a list is read as it was written, and no part of one, nor a longer one") {
    MasterList list = list_of(7, {at(1), at(2)});
    list.own = 2;
    const std::vector<std::byte> bytes = bytes_of(list);
    Reader r(bytes);
    MasterList back;
    REQUIRE(back.read(r));
    CHECK(back == list);
    CHECK(back.own_address() == at(2));
    for (size_t n = 0; n < bytes.size(); ++n) CHECK(!reads(std::span(bytes).first(n)));
    Addresses many;
    for (int i = 0; i < 9; ++i) many.push_back(at(i + 1));
    CHECK(!reads(bytes_of(list_of(7, many))));
    many.pop_back();
    CHECK(reads(bytes_of(list_of(7, many))));
    list.own = 3;
    CHECK(!reads(bytes_of(list)));
    for (const std::string& bad :
         {std::string("0.0.0.0:7700"), std::string(400, 'a') + ":1", std::string("x")}) {
        MasterList with = list_of(7, {at(1), bad, at(2)});
        with.own = 3;
        const std::vector<std::byte> written = bytes_of(with);
        Reader from(written);
        MasterList without;
        REQUIRE(without.read(from));
        CHECK(without.addresses == Addresses{at(1), at(2)});
        CHECK(without.own_address() == at(2));
        with.own = 2;
        const std::vector<std::byte> of_it = bytes_of(with);
        Reader again(of_it);
        REQUIRE(without.read(again));
        CHECK(without.own == 0);
    }
}

TEST_CASE("masters: what was learned stays until an owner's list with a standby does not name it") {
    KnownMasters known({at(1), at(2)});
    CHECK(!known.hear(list_of(5, {at(1), at(2)})));
    CHECK(known.hear(list_of(5, {at(1), at(3)})));
    CHECK(known.learned() == Addresses{at(3)});
    CHECK(!known.hear(list_of(5, {at(1)})));         // the owner has lost it, and it may be the next one
    CHECK(!known.hear(list_of(4, {at(9)}, false)));  // of a former owner's standby
    CHECK(known.hear(list_of(6, {at(3), at(4)}, false)));
    CHECK(!known.hear(list_of(6, {at(4)})));  // an owner that has just taken over has no standby yet
    CHECK(known.learned() == Addresses{at(3), at(4)});
    CHECK(known.hear(list_of(6, {at(4), at(1)})));
    CHECK(known.learned() == Addresses{at(4)});
    CHECK(known.all() == Addresses{at(1), at(2), at(4)});
    CHECK(known.hear(list_of(7, {at(1), at(2)})));
    CHECK(known.all() == Addresses{at(1), at(2)});
    CHECK(known.hear(
        list_of(3, {at(1), at(5)})));  // of an owner that was started again, and whose clock is behind
    CHECK(known.learned() == Addresses{at(5)});
    CHECK(known.hear(list_of(8, {at(1), at(2)})));
    CHECK(known.learned().empty());
}

TEST_CASE("masters: after a take-over each master of the former list is known as a next owner") {
    KnownMasters known({at(1)});
    CHECK(known.hear(list_of(5, {at(2), at(3)})));
    for (Version term = 6; term < 60; ++term) {
        // Another owner without a standby each time: what is known is bounded, and the owner is in it.
        const std::string owner = at(2 + static_cast<int>(term % 20));
        known.hear(list_of(term, {owner}));
        CHECK(known.knows(owner));
        CHECK(known.learned().size() <= kMastersMax);
        if (term == 6) CHECK(known.knows(at(3)));  // it has not attached to the new owner yet
    }
    CHECK(known.learned().size() == kMastersMax);
    CHECK(known.hear(list_of(60, {at(2), at(3)})));
    CHECK(known.learned() == Addresses{at(2), at(3)});
}

TEST_CASE(
    "masters: what an owner's list does not name is not learned from a refusal while a master answers") {
    KnownMasters known({at(1)});
    CHECK(known.hear_of(at(2), at(1)));  // no owner was heard yet
    CHECK(known.hear(list_of(5, {at(1), at(3)})));
    CHECK(!known.hear_of(at(2), at(1)));
    CHECK(known.hear_of(at(2), at(1), true));
}

TEST_CASE("masters: an address of the own host is believed only of a master that was reached there") {
    for (const std::string own :
         {"127.0.0.1:7700", "127.1:7700", "[::1]:7700", "localhost:7700", "[::ffff:127.0.0.1]:7700"}) {
        KnownMasters far({at(1)}), near({"localhost:1"}), by_node({at(1)});
        CHECK(!far.hear(list_of(5, {own}), at(1)));
        CHECK(!far.hear_of(own, at(1), true));
        CHECK(near.hear(list_of(5, {own}), "localhost:1"));
        CHECK(by_node.hear(list_of(5, {own})));
    }
}

TEST_CASE("masters: a process whose node relays hears the names of its own list") {
    KnownMasters known({"owner.host:7700", "standby.host:7700"});
    MasterList list = list_of(5, {at(1), at(2)});
    list.own = 2;
    known.hear(list, "standby.host:7700");
    CHECK(known.as_configured(at(2)) == "standby.host:7700");
    CHECK(known.as_configured(at(1)) == at(1));
}

TEST_CASE("masters: an owner's next standby takes the place of the former, and one that it lost stays") {
    KnownMasters known({at(1)});
    for (int i = 2; i < 40; ++i) {
        known.hear(list_of(5, {at(1), at(i)}));
        CHECK(known.learned() == Addresses{at(i)});
        CHECK_FALSE(known.hear(list_of(5, {at(1)})));
        CHECK(known.learned() == Addresses{at(i)});
    }
}

TEST_CASE("masters: a master that is listed under its own name has no other one any more") {
    KnownMasters known({"vip:7700", at(2)});
    MasterList of_one = list_of(5, {at(1)}), of_two = list_of(6, {at(2)});
    of_one.own = of_two.own = 1;
    known.hear(of_one, "vip:7700");
    CHECK(known.knows(at(1)));
    known.hear(of_two, "vip:7700");
    CHECK_FALSE(known.knows(at(1)));
    CHECK(known.as_configured(at(1)) == at(1));
}

TEST_CASE("masters: at most 8 are learned, the oldest makes room, and what is configured stays") {
    KnownMasters known({at(1)});
    for (int i = 2; i < 40; ++i) {
        known.hear(list_of(5, {at(1), at(i)}, false));
        CHECK(known.learned().size() == std::min<size_t>(static_cast<size_t>(i) - 1, kMastersMax));
        CHECK(known.learned().back() == at(i));
    }
    CHECK(known.all().front() == at(1));
    for (int i = 40; i < 60; ++i) CHECK(known.hear_of(at(i), at(1), true));
    CHECK(known.learned().size() == kMastersMax);
    CHECK(!known.hear_of("0.0.0.0:7700", at(1), true));
    CHECK(!known.hear_of(at(1), at(1), true));
}

TEST_CASE("masters: another name of a configured one is not learned") {
    KnownMasters known({"owner.host:7700", "standby.host:7700"});
    MasterList list = list_of(5, {at(1), at(2)});
    list.own = 1;
    CHECK(known.hear(list, "owner.host:7700"));
    CHECK(known.learned() == Addresses{at(2)});
    list.of_owner = false;
    list.own = 2;
    CHECK(known.hear(list, "standby.host:7700"));
    CHECK(known.learned().empty());
    CHECK(!known.hear_of(at(1), "standby.host:7700", true));
    list.own = 1;
    CHECK(!known.hear(list, at(1)));  // as from a learned address it is no other name
}

TEST_CASE("masters: one process joins a master once, whatever names it has") {
    MasterClaims claims;
    Incarnation one{}, other{};
    other.fill(1);
    CHECK(claims.take(one));
    CHECK(!claims.take(one));
    CHECK(claims.take(other));
    claims.give_back(one);
    CHECK(!claims.has(one));
    CHECK(claims.take(one));
}

TEST_CASE("masters: a standby that refuses names its owner, which is dialed next and remembered") {
    auto owner = serve();
    auto standby = follow(*owner);
    MasterAddresses addresses(standby->addresses().front());
    CHECK(addresses.dial(dialing()).ok());
    CHECK(addresses.learned() == owner->addresses());
    std::string named;
    DialOptions to = dialing();
    to.address = standby->addresses().front();
    to.instead = &named;
    CHECK(!dial(to).ok());
    CHECK(named == owner->addresses().front());
}

TEST_CASE("masters: an address of which the proof is wrong, or cut off, is not believed") {
    for (size_t proof_bytes : {32u, 31u, 0u}) {
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        Fd other(ends[0]);
        std::vector<std::byte> said;
        const std::vector<std::byte> zeros(48);
        size_t begin = begin_frame(said, Kind::kChallenge, 0, 0);
        Writer(said).bytes(zeros.data(), zeros.size());
        finish_frame(said, begin);
        begin = begin_frame(said, Kind::kError, kFlagAnswer, 1);
        write_error_body(Writer(said), Code::kUnavailable, "this master is a standby");
        Writer(said).text16(at(66));
        Writer(said).bytes(zeros.data(), proof_bytes);
        finish_frame(said, begin);
        REQUIRE(::send(other.get(), said.data(), said.size(), 0) == static_cast<ssize_t>(said.size()));
        std::string named;
        DialOptions to = dialing();
        to.connect = [&]() -> Result<Fd> { return Fd(ends[1]); };
        to.instead = &named;
        Result<Dialed> dialed = dial(to);
        REQUIRE(!dialed.ok());
        CHECK(dialed.error().text.find("this master is a standby") != std::string::npos);
        CHECK(named.empty());
    }
}

TEST_CASE("masters: an owner that was dialed out of turn is the last to be dialed when it is lost") {
    std::string owner;
    std::atomic<int> asked{0};
    Service standby;
    standby.welcome = [&](std::string_view) -> Result<std::vector<std::byte>> {
        ++asked;
        return Error{Code::kUnavailable, "this master is a standby"};
    };
    standby.instead = [&] { return owner; };
    standby.serve = [](const AuthenticatedConnection&) {};
    Service serving;
    serving.welcome = [](std::string_view) { return std::vector<std::byte>(); };
    serving.serve = [](const AuthenticatedConnection&) {};
    auto second = listen(kToken, serving);
    owner = second->addresses().front();
    auto first = listen(kToken, standby);
    MasterAddresses addresses(first->addresses().front() + "," + owner);
    CHECK(addresses.dial(dialing()).ok());
    CHECK(asked == 1);
    CHECK(addresses.dial(dialing()).ok());
    CHECK(asked == 2);
    first->stop();
    second->stop();
}

TEST_CASE("masters: a process without the secret names none") {
    Service service;
    service.welcome = [](std::string_view) -> Result<std::vector<std::byte>> {
        return Error{Code::kUnavailable, "this master is a standby"};
    };
    service.instead = [] { return at(66); };
    service.serve = [](const AuthenticatedConnection&) {};
    auto listener = listen("another token", service);
    MasterAddresses addresses(listener->addresses().front());
    DialOptions to = dialing();
    to.timeout_ms = 200;  // 10.0.0.66 may be a host that does not answer
    CHECK(!addresses.dial(to).ok());
    CHECK(addresses.learned().empty());
    to.token = "another token";
    CHECK(!addresses.dial(to).ok());  // it follows
    CHECK(addresses.learned() == Addresses{at(66)});
    listener->stop();
}

TEST_CASE(
    "masters: a list that makes no sense is ignored, and a frame that is longer than one ends the "
    "connection") {
    std::vector<std::byte> welcome = bytes_of(list_of(7, {at(1)})), frame;
    Code code = Code::kTimeout;  // as to a question without an answer
    SUBCASE("in WELCOME: more addresses than there may be") {
        Addresses many;
        for (int i = 0; i < 200; ++i) many.push_back(at(i + 1));
        welcome = bytes_of(list_of(7, many));
    }
    SUBCASE("in WELCOME: cut off") { welcome.resize(welcome.size() - 3); }
    SUBCASE("a frame: an address that is none") { write_masters_frame(frame, list_of(8, {"0.0.0.0:1"})); }
    SUBCASE("a frame: nothing in it") { write_masters_question(frame); }
    SUBCASE("a frame: of 1 GiB") {
        code = Code::kProtocol;
        write_masters_frame(frame, list_of(8, {at(2)}));
        const uint32_t length = 1u << 30;
        std::memcpy(frame.data() + offsetof(FrameHeader, length), &length, sizeof(length));
    }
    SUBCASE("a frame: longer than a list") {
        code = Code::kProtocol;
        const MasterList list = list_of(8, {at(2)});
        size_t begin = begin_frame(frame, Kind::kMasters, kFlagOneWay, 0);
        list.write(Writer(frame));
        frame.resize(frame.size() + 100000);
        finish_frame(frame, begin);
    }
    SUBCASE("more and more of them") {
        code = Code::kProtocol;
        for (int i = 0; i < 1100; ++i) write_masters_question(frame);
    }
    Mutex mutex;
    std::vector<AuthenticatedConnection> callers;
    Service service;
    service.welcome = [&](std::string_view) -> Result<std::vector<std::byte>> { return welcome; };
    service.serve = [&](AuthenticatedConnection caller) {
        MutexLock lock(mutex);
        (void)!::send(caller.fd.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
        callers.push_back(std::move(caller));
    };
    auto listener = listen(kToken, service);
    DirectoryClientOptions options;
    options.master = listener->addresses().front();
    options.token = kToken;
    options.timeout_ms = 500;
    DirectoryClient client(options);
    Result<std::shared_ptr<const Members>> members = client.members(true);
    REQUIRE(!members.ok());
    CHECK(members.error().code == code);
    for (const std::string& one : client.learned()) CHECK(one == at(1));  // of the sound WELCOME
    client.close();
    listener->stop();
}

TEST_CASE("masters: a list that comes to a call without any time left is heard by the next one") {
    std::vector<std::byte> welcome = bytes_of(list_of(7, {at(1)})), frame;
    write_masters_frame(frame, list_of(8, {at(2), at(3)}));
    Mutex mutex;
    std::vector<AuthenticatedConnection> callers;
    Service service;
    service.welcome = [&](std::string_view) -> Result<std::vector<std::byte>> { return welcome; };
    service.serve = [&](AuthenticatedConnection caller) {
        MutexLock lock(mutex);
        callers.push_back(std::move(caller));
    };
    auto listener = listen(kToken, service);
    DirectoryClientOptions options;
    options.master = listener->addresses().front();
    options.token = kToken;
    options.timeout_ms = 500;
    DirectoryClient client(options);
    const auto ask_without_time = [&] {
        WaitBudget budget(1);
        WaitBudget::spent(1);
        return client.members(true).error().code;
    };
    REQUIRE(until([&] { return ask_without_time() == Code::kTimeout; }));  // it has a connection now
    REQUIRE(until([&] {
        MutexLock lock(mutex);
        return callers.size() == 1;
    }));
    {
        MutexLock lock(mutex);
        REQUIRE(::send(callers.front().fd.get(), frame.data(), frame.size(), MSG_NOSIGNAL) ==
                static_cast<ssize_t>(frame.size()));
    }
    CHECK(ask_without_time() == Code::kTimeout);  // and keeps it
    CHECK(client.learned() == Addresses{at(1)});
    CHECK(!client.members(true).ok());  // the peer answers nothing
    CHECK(client.learned() == Addresses{at(2), at(3)});
    client.close();
    listener->stop();
}

TEST_CASE("masters: an agent with a connection keeps it, and leaves no master for a list") {
    auto one = serve(), other = serve();
    FakeNode node(one->addresses().front(), "a");
    const auto joined = [&](MasterServer& master) { return master.nodes().rows.size() == 1; };
    REQUIRE(until([&] { return node.agent().state().joined && joined(*one); }));
    CHECK(!node.agent().set_master(other->addresses().front()));
    CHECK(node.agent().set_master(""));
    CHECK(node.agent().place() == one->addresses().front());
    const uint64_t beats = node.agent().counters().beats_total;
    REQUIRE(until([&] { return node.agent().counters().beats_total > beats + 2; }));
    CHECK(node.agent().state().joined);
    CHECK(one->nodes().rows.front().member.state == MemberState::kAlive);
    one->stop();
    REQUIRE(until([&] { return node.agent().place().empty(); }));
    CHECK(!node.agent().state().joined);
    CHECK(node.agent().set_master(other->addresses().front()));
    CHECK(until([&] { return joined(*other) && node.agent().state().joined; }));
}

TEST_CASE("masters: refusals that name one master after the other come to an end") {
    std::atomic<int> calls{0};
    std::unique_ptr<Listener> listener;
    Service service;
    service.welcome = [](std::string_view) -> Result<std::vector<std::byte>> {
        return Error{Code::kUnavailable, "this master is a standby"};
    };
    // Each time the same process, by another name of its own.
    service.instead = [&] {
        const std::string address = listener->addresses().front();
        return "127.0.1." + std::to_string(++calls) + address.substr(address.find(':'));
    };
    service.serve = [](const AuthenticatedConnection&) {};
    ListenerOptions options;
    options.addresses = {"0.0.0.0:0"};
    options.token = kToken;
    Result<std::unique_ptr<Listener>> made = Listener::create(std::move(options));
    REQUIRE(made.ok());
    listener = std::move(*made);
    listener->offer(std::string(kServiceDirectory), service);
    REQUIRE(listener->start());
    const std::string address = listener->addresses().front();
    const std::string configured = "127.0.0.1" + address.substr(address.find(':'));
    MasterAddresses addresses(configured);
    Result<Dialed> dialed = addresses.dial(dialing());
    REQUIRE(!dialed.ok());
    CHECK(calls == 1 + static_cast<int>(kMastersMax));
    CHECK(dialed.error().text.starts_with(configured));  // what a user has written
    listener->stop();
}

TEST_CASE("masters: a standby names its owner as that one calls itself, and none once it has taken over") {
    auto owner = serve("127.0.0.1:0", [](MasterServerOptions& options) { options.advertise = at(1); });
    auto standby = follow(*owner);
    std::string named;
    DialOptions to = dialing();
    to.address = standby->addresses().front();
    to.instead = &named;
    CHECK(!dial(to).ok());
    CHECK(named == at(1));
    owner->stop();
    REQUIRE(until([&] { return standby->role() == MasterRole::kActing; }));
    REQUIRE(standby->take_over());
    auto node = std::make_unique<FakeNode>(standby->addresses().front(), "a");
    REQUIRE(until([&] { return node->agent().state().joined; }));
    node->set_applied(UINT64_MAX / 2);  // a removal of a later owner
    REQUIRE(until([&] { return standby->role() == MasterRole::kSuperseded; }));
    named.clear();
    CHECK(!dial(to).ok());
    CHECK(named.empty());
}

TEST_CASE("masters: a client that runs hears of a new standby, and goes there when its owner is gone") {
    auto owner = serve();
    DirectoryClientOptions options;
    options.master = owner->addresses().front();
    options.token = kToken;
    DirectoryClient client(options);
    REQUIRE(client.members(true).ok());
    CHECK(client.learned().empty());
    auto standby = follow(*owner);
    REQUIRE(until([&] { return client.members(true).ok() && !client.learned().empty(); }));
    CHECK(client.learned() == standby->addresses());
    owner->stop();
    REQUIRE(until([&] { return standby->role() == MasterRole::kActing; }));
    REQUIRE(standby->take_over());
    CHECK(until([&] { return client.members(true).ok(); }));
}

TEST_CASE("masters: what a master that runs says is also its state, for status") {
    auto owner = serve();
    auto standby = follow(*owner);
    Addresses both = {owner->addresses().front(), standby->addresses().front()};
    for (const std::string& one : both) {
        DialOptions to = dialing();
        to.address = one;
        CHECK(until([&] {
            Result<MasterState> state = ask_master_state(to);
            return state.ok() && state->masters.addresses == both && state->masters.own_address() == one;
        }));
    }
}
