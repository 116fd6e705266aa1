// Masters of two ranges, nodes that join both, and clients of the whole, over real sockets in one process.
#include <doctest/doctest.h>

#include <future>

#include "../transport/relay.hpp"
#include "directory/pool_directory.hpp"
#include "server_bed.hpp"

namespace moonpool {
namespace {

using namespace testing;  // NOLINT: the bed is of these tests alone

std::unique_ptr<MasterServer> serve_range(const Range& range, const std::string& at = "127.0.0.1:0") {
    return serve(at, [&](MasterServerOptions& o) { o.range = range; });
}

// Two masters, a node with an agent for each, and their clients.
struct Bed {
    std::unique_ptr<MasterServer> masters[2] = {serve_range({0, 2}), serve_range({1, 2})};
    std::string addresses[2] = {masters[0]->addresses()[0], masters[1]->addresses()[0]};
    std::string all = addresses[0] + ";" + addresses[1];
    // Another one at the second master alone, so that the two masters number nodes otherwise.
    FakeNode other{addresses[1], "other", 7, nullptr, Range{1, 2}};
    bool joined = until([&] { return other.agent().state().joined; });
    FakeNode nodes[2] = {{addresses[0], "a", 1, nullptr, Range{0, 2}},
                         {addresses[1], "a", 1, nullptr, Range{1, 2}}};

    void put(uint64_t n) {
        for (FakeNode& node : nodes) node.put(n);
    }
};

size_t found(PoolDirectory& directory, std::span<const Hash128> keys, const LocateOptions& how = {}) {
    Result<LocateAnswer> answer = directory.locate(keys, how);
    if (!answer) return 0;
    size_t n = 0;
    for (size_t i = 0; i < answer->keys.size(); ++i) {
        for (const Holder& holder : answer->keys[i]) {
            const Member* member = answer->members->find(holder.node);
            n += member != nullptr && member->identity.name == "a" &&
                 answer->members->state(*member, keys[i]) == MemberState::kAlive;
        }
    }
    return n;
}

uint64_t key_of(uint32_t range, uint64_t from) {
    while (range_of(hash_of(from), 2) != range) ++from;
    return from;
}

TEST_CASE("pool directory: keys of all ranges are found in their order, by one number of their node") {
    Bed bed;
    for (uint64_t n = 0; n < 400; ++n) bed.put(n);
    PoolDirectory directory(client_options(bed.all));
    std::vector<Hash128> keys = hashes(0, 500);
    REQUIRE(until([&] { return found(directory, keys) == 400; }));
    Result<LocateAnswer> answer = directory.locate(keys);
    REQUIRE(answer);
    for (size_t i = 0; i < keys.size(); ++i) CHECK(answer->keys[i].size() == (i < 400));
    REQUIRE(answer->keys[0].size() == 1);
    for (size_t i = 0; i < 400; ++i) CHECK(answer->keys[i][0].node == answer->keys[0][0].node);
    CHECK(directory.members(true).value()->rows.size() == 2);
    CHECK(bed.masters[0]->snapshot() != bed.masters[1]->snapshot());
    LocateOptions prefix;
    prefix.prefix = true;
    prefix.width = 10;
    CHECK(directory.locate(keys, prefix)->keys.size() == 400);
    for (FakeNode& node : bed.nodes) node.remove(355);
    REQUIRE(until([&] { return directory.locate(keys, prefix)->keys.size() == 350; }));
    // A node is told by the number that its answer gave, and avoided.
    NodeId a = answer->keys[0][0].node;
    Result<std::vector<NodeId>> place = directory.place(10, 2);
    REQUIRE(place);
    CHECK(std::ranges::find(*place, a) != place->end());
    PlaceOptions avoid;
    avoid.avoid_nodes = {a};
    Result<std::vector<NodeId>> elsewhere = directory.place(10, 2, avoid);
    REQUIRE(elsewhere);
    CHECK(std::ranges::find(*elsewhere, a) == elsewhere->end());
}

TEST_CASE("pool directory: a range without a master makes its own keys unknown, and no others") {
    Bed bed;
    for (uint64_t n = 0; n < 100; ++n) bed.put(n);
    PoolDirectory directory(client_options(bed.all));
    std::vector<Hash128> keys = hashes(0, 100);
    REQUIRE(until([&] { return found(directory, keys) == 100; }));
    bed.masters[1]->stop();
    auto has_found_out = [&] {
        Result<LocateAnswer> answer = directory.locate(keys);
        return answer && answer->unreached.contains(1);
    };
    REQUIRE(until(has_found_out));
    Result<LocateAnswer> answer = directory.locate(keys);
    REQUIRE(answer);
    for (size_t i = 0; i < keys.size(); ++i) {
        bool is_first = range_of(keys[i], 2) == 0;
        CHECK(answer->keys[i].size() == is_first);
        CHECK((answer->unknown(keys[i]) == nullptr) == is_first);
    }
    LocateOptions prefix;
    prefix.prefix = true;
    size_t leading = 0;
    while (range_of(keys[leading], 2) == 0) ++leading;
    CHECK(directory.locate(keys, prefix)->keys.size() == leading);
    CHECK(directory.place(10, 1)->size() == 1);
    CHECK(directory.members(true).ok());
    Hash128 first = hash_of(key_of(0, 0)), second = hash_of(key_of(1, 0));
    CHECK(directory.order({&first, 1}, nullptr).ok());
    CHECK(!directory.order({&second, 1}, nullptr).ok());
    bed.masters[1] = serve_range({1, 2}, bed.addresses[1]);
    CHECK(until([&] { return found(directory, keys) == 100; }));
    bed.masters[0]->stop();
    bed.masters[1]->stop();
    CHECK(until([&] { return !directory.locate(keys).ok(); }));
}

TEST_CASE("pool directory: a removal has its place in the order of its range alone") {
    Bed bed;
    uint64_t n = key_of(1, 0);
    bed.put(n);
    PoolDirectory directory(client_options(bed.all));
    Hash128 key = hash_of(n);
    REQUIRE(until([&] { return found(directory, {&key, 1}) == 1; }));
    RangeVersions before = directory.newest();
    Result<OrderAnswer> order = directory.order({&key, 1}, nullptr);
    REQUIRE(order);
    REQUIRE(order->at.keys[0].size() == 1);
    NodeId a = order->at.keys[0][0].node;
    CHECK(order->at.members->find(a)->identity.name == "a");
    OrderDone done{{key}, order->versions, order->epoch, {{a}}, {{}}};
    Result<std::vector<Version>> last = directory.ordered(done);
    REQUIRE(last);
    CHECK(*last == order->versions);
    CHECK(directory.newest().at(0) == before.at(0));
    CHECK(directory.newest().at(1) >= order->versions[0]);
    // Told as the master numbers it: its row stays, where that of an untold node goes.
    CHECK(found(directory, {&key, 1}) == 1);
    order = directory.order({&key, 1}, nullptr);
    REQUIRE(order);
    REQUIRE(directory.ordered({{key}, order->versions, order->epoch, {{}}, {{}}}).ok());
    CHECK(found(directory, {&key, 1}) == 0);
    REQUIRE(until([&] { return bed.nodes[1].size() == 0; }));
    CHECK(bed.nodes[0].size() == 1);
}

TEST_CASE("pool directory: a master refuses keys of other ranges, and the connection stays") {
    Bed bed;
    DirectoryClientOptions options = client_options(bed.addresses[0]);
    options.range = {0, 2};
    DirectoryClient client(options);
    Hash128 mine = hash_of(key_of(0, 0)), others = hash_of(key_of(1, 0));
    REQUIRE(client.locate({&mine, 1}).ok());
    Result<LocateAnswer> located = client.locate({&others, 1});
    REQUIRE(!located);
    CHECK(located.error().text == "a key is of another range of the shards than this master's, 0/2");
    CHECK(!client.order({&others, 1}, nullptr).ok());
    CHECK(!client.forget({&others, 1}).ok());
    CHECK(!client.ordered({{others}, {first_version(1)}, 0, {{}}, {{}}}).ok());
    CHECK(client.connected());
    CHECK(client.locate({&mine, 1}).ok());
}

TEST_CASE("pool directory: a peer that expects another range is refused, and told both and the remedy") {
    Bed bed;
    auto refusal = [&](const std::string& master, const Range& range) {
        DirectoryClientOptions options = client_options(master);
        options.range = range;
        DirectoryClient client(options);
        Result<std::shared_ptr<const Members>> members = client.members(true);
        return members ? std::string() : members.error().text;
    };
    CHECK(refusal(bed.addresses[0], {0, 2}) == "");
    std::string wrong = refusal(bed.addresses[0], {1, 2});
    CHECK(wrong ==
          "the master at " + bed.addresses[0] +
              " has range 0/2 of the shards, and range 1/2 is expected there: set master.range there, "
              "or correct the order and number of the ranges in cluster.master");
    // As one of the release before, which knows no ranges.
    std::string of_one = refusal(bed.addresses[0], {});
    CHECK(of_one.find("this master has range 0/2 of the shards") != std::string::npos);
    CHECK(of_one.find("set cluster.master to the masters of all 2 ranges") != std::string::npos);
    auto whole = serve();
    CHECK(refusal(whole->addresses()[0], {1, 4}).find("has range 0/1 of the shards, and range 1/4") !=
          std::string::npos);
    CHECK(refusal(whole->addresses()[0], {}) == "");
    FakeNode swapped(bed.addresses[0], "swapped", 5, nullptr, Range{1, 2});
    FakeNode old(bed.addresses[0], "old", 6);
    CHECK(until(
        [&] { return swapped.agent().state().why_not.find("range 1/2 is expected") != std::string::npos; }));
    CHECK(until([&] { return old.agent().state().why_not.find("has range 0/2") != std::string::npos; }));
    auto standby = serve("127.0.0.1:0", [&](MasterServerOptions& o) {
        o.range = {1, 2};
        o.standby_of = bed.addresses[0];
    });
    CHECK(!until([&] { return standby->standby().is_whole; }, 300));
    auto right = serve("127.0.0.1:0", [&](MasterServerOptions& o) {
        o.range = {0, 2};
        o.standby_of = bed.addresses[0];
    });
    CHECK(until([&] { return right->standby().is_whole; }));
    DialOptions to;
    to.address = bed.addresses[1];
    to.token = kToken;
    Result<MasterState> state = ask_master_state(to);
    REQUIRE(state);
    CHECK(state->range == Range{1, 2});
    MasterServerOptions none;
    none.addresses = {"127.0.0.1:0"};
    none.token = kToken;
    none.range = {4, 4};
    CHECK(!MasterServer::create(std::move(none)).ok());
}

// Each case fails where the second master is asked when the first has answered.
TEST_CASE("pool directory: the masters of all ranges are asked at once") {
    Bed bed;
    for (uint64_t n = 0; n < 100; ++n) bed.put(n);
    Relay first(bed.addresses[0]), second(bed.addresses[1]);
    PoolDirectory directory(client_options(first.address() + ";" + second.address()));
    std::vector<Hash128> keys = hashes(0, 100);
    REQUIRE(until([&] { return found(directory, keys) == 100; }));
    LocateOptions prefix;
    prefix.prefix = true;
    first.cut_all();
    uint64_t asked = second.took(0);
    auto located = std::async(std::launch::async, [&] { return found(directory, keys, prefix); });
    CHECK(until([&] { return second.took(0) > asked; }, 4000));
    first.join();
    CHECK(located.get() == 100);
    first.cut_all();
    asked = second.took(0);
    auto forgot = std::async(std::launch::async, [&] { return directory.forget(keys); });
    CHECK(until([&] { return second.took(0) > asked; }, 4000));
    first.join();
    CHECK(forgot.get().ok());
}

TEST_CASE("pool directory: of several silent masters a call waits as long as for one") {
    Bed bed;
    Relay first(bed.addresses[0]), second(bed.addresses[1]);
    DirectoryClientOptions options = client_options(first.address() + ";" + second.address());
    options.timeout_ms = 3000;
    PoolDirectory directory(options);
    std::vector<Hash128> keys = hashes(0, 10);
    REQUIRE(until([&] {
        auto all = directory.locate(keys);
        return all && all->unreached.empty();
    }));
    first.cut_all();
    second.cut_all();
    auto begun = std::chrono::steady_clock::now();
    Result<LocateAnswer> answer = directory.locate(keys);
    auto took = std::chrono::steady_clock::now() - begun;
    REQUIRE(!answer);
    CHECK(answer.error().code == Code::kTimeout);
    CHECK(took >= std::chrono::milliseconds(2900));
    CHECK(took < std::chrono::milliseconds(5500));
    first.join();
    second.join();
    CHECK(until([&] {
        auto all = directory.locate(keys);
        return all && all->unreached.empty();
    }));
}

TEST_CASE("pool directory: a prefix that ends before the keys of a range that is away says nothing of it") {
    Bed bed;
    std::vector<Hash128> keys = {hash_of(key_of(0, 0)), hash_of(key_of(0, 1000)), hash_of(key_of(1, 0))};
    bed.put(key_of(0, 0));
    PoolDirectory directory(client_options(bed.all));
    LocateOptions prefix;
    prefix.prefix = true;
    REQUIRE(until([&] { return found(directory, keys, prefix) == 1; }));
    bed.masters[1]->stop();
    REQUIRE(until([&] {
        auto all = directory.locate(keys);
        return all && all->unreached.contains(1);
    }));
    Result<LocateAnswer> answer = directory.locate(keys, prefix);
    REQUIRE(answer);
    CHECK(answer->keys.size() == 1);
    CHECK(answer->unreached.empty());
    bed.put(key_of(0, 1000));
    CHECK(until([&] { return directory.locate(keys, prefix)->unreached.contains(1); }));
}

}  // namespace
}  // namespace moonpool
