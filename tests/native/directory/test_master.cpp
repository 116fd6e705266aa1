// Master without sockets: what it answers, and that no copy of a removed key comes back.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "../random.hpp"
#include "../sanitizer.hpp"
#include "directory/master.hpp"
#include "directory/protocol.hpp"

namespace moonpool {
namespace {

using testing::Random;

constexpr Version kFirst = first_version(1000);

Hash128 hash_of(uint64_t n) { return xxh3_128(&n, sizeof(n)); }

std::string bytes_of(const std::vector<std::byte>& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string hashes_of(const std::vector<uint64_t>& keys) {
    std::vector<std::byte> out;
    Writer w(out);
    for (uint64_t key : keys) write_hash(w, hash_of(key));
    return bytes_of(out);
}

std::string rows_of(const std::vector<uint64_t>& keys, bool added = true, Tier tier = Tier::kDram) {
    std::vector<std::byte> out;
    Writer w(out);
    for (uint64_t key : keys) write_row(w, DeltaRow{hash_of(key), tier, added});
    return bytes_of(out);
}

// A node as the master meets it: what it holds, each with the version that it was put with, and what it does
// with drops.
struct Node {
    Master& master;
    std::string name;
    uint8_t life = 1;
    NodeId id = kNoNode;
    LinkId link = kNoLink;
    uint64_t drops_done = 0;
    Version applied = kNoVersion;
    bool recovered = false;  // what it holds comes from its disk
    std::map<uint64_t, Version> held{};
    std::set<uint64_t> to_tell{};  // anew, as the master took them for older ones
    bool empty() const { return held.empty(); }
    std::set<uint64_t> keys() const {
        std::set<uint64_t> keys;
        for (auto& [key, version] : held) keys.insert(key);
        return keys;
    }
    std::vector<uint64_t> key_list() const {
        std::set<uint64_t> all = keys();
        return {all.begin(), all.end()};
    }
    void hold(const std::vector<uint64_t>& all) {
        for (uint64_t key : all) held[key] = kNoVersion;
    }

    bool join(uint64_t now, LinkId new_link) {
        NodeIdentity who;
        who.name = name;
        who.host_id = "h";
        who.incarnation.fill(life);
        who.incarnation[0] = static_cast<uint8_t>(name[0]);
        NodeLoad load;
        load.tenants.push_back({"default", 1000, 500, 0, 0});
        Result<Master::JoinAnswer> joined =
            master.join(now, who, load, new_link, empty() ? UINT64_MAX : applied, recovered);
        if (!joined) return false;
        id = joined->id;
        link = new_link;
        if (!joined->resumed) drops_done = 0;
        carry_out(now);
        return true;
    }
    void inventory(uint64_t now) {
        REQUIRE(master.delta(now, id, link, kDeltaBegin, applied, rows_of(key_list())));
        REQUIRE(master.delta(now, id, link, kDeltaEnd, applied, {}));
        beat(now);
        beat(now);
    }
    void put(uint64_t now, uint64_t key) {
        held[key] = master.newest();
        if (link != kNoLink) REQUIRE(master.delta(now, id, link, 0, applied, rows_of({key})));
    }
    void remove(uint64_t now, uint64_t key) {
        held.erase(key);
        if (link != kNoLink) REQUIRE(master.delta(now, id, link, 0, applied, rows_of({key}, false)));
    }
    void beat(uint64_t now) {
        master.beat(now, id, link, {}, drops_done, applied);
        carry_out(now);
    }
    // Over the wire, as it will be.
    void carry_out(uint64_t now) {
        std::vector<std::byte> out;
        Writer w(out);
        write_drops(w, master.drops(id), 2);
        write_versions(w, master.drops(id), 2, master.closed());
        Reader r{std::span<const std::byte>(out)};
        Drops drops;
        REQUIRE(read_drops(r, drops));
        uint64_t end = drops.first + drops.items.size();
        if (drops.all && drops.first > drops_done)
            std::erase_if(held, [&](const auto& copy) { return copy.second < drops.all_before; });
        for (size_t i = 0; i < drops.items.size(); ++i) {
            const Drop& drop = drops.items[i];
            if (drops.first + i < drops_done) continue;
            std::erase_if(held, [&](const auto& copy) {
                if (hash_of(copy.first) != drop.hash) return false;
                if (copy.second < drop.version) return true;
                to_tell.insert(copy.first);
                return false;
            });
        }
        drops_done = std::max(drops_done, end);
        // Before it is right up to there.
        for (uint64_t key : std::exchange(to_tell, {})) {
            if (held.contains(key)) REQUIRE(master.delta(now, id, link, 0, applied, rows_of({key})));
        }
        applied = std::max(applied, drops.upto);
    }
    void disconnect() {
        master.disconnected(id, link);
        link = kNoLink;
    }
    void leave(uint64_t now) {
        master.left(now, id, link);
        link = kNoLink;
        id = kNoNode;
    }
};

std::vector<std::vector<Holder>> locate(Master& master, const std::vector<uint64_t>& keys, uint8_t flags = 0,
                                        uint32_t width = 1, uint8_t holders_max = 0) {
    std::vector<std::byte> out;
    Writer w(out);
    master.locate(hashes_of(keys), flags, holders_max, width, w);
    Reader r{std::span<const std::byte>(out)};
    std::vector<std::vector<Holder>> found(r.number<uint32_t>());
    for (auto& holders : found) {
        holders.resize(r.number<uint8_t>());
        for (Holder& holder : holders) {
            holder.node = r.number<NodeId>();
            holder.tier = static_cast<Tier>(r.number<uint8_t>());
        }
    }
    REQUIRE(r.done());
    REQUIRE(master.check_integrity());
    return found;
}

TEST_CASE("master: locates in DRAM before SSD, stops at the first gap, counts whole blocks") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    REQUIRE(master.delta(0, a.id, 1, kDeltaBegin | kDeltaEnd, 0, rows_of({1, 2, 3, 4, 5}, true, Tier::kSsd)));
    REQUIRE(master.delta(0, b.id, 2, kDeltaBegin | kDeltaEnd, 0, rows_of({1, 3})));
    using Holders = std::vector<Holder>;
    Holder ssd{a.id, Tier::kSsd}, dram{b.id, Tier::kDram};
    CHECK(locate(master, {1, 2, 9}) == std::vector<Holders>{{dram, ssd}, {ssd}, {}});
    CHECK(locate(master, {1, 3}, 0, 1, 1) == std::vector<Holders>{{dram}, {dram}});
    CHECK(locate(master, {1, 2, 9, 3}, kLocatePrefix).size() == 2);
    CHECK(locate(master, {1, 2, 3, 4, 5, 9}, kLocatePrefix, 2).size() == 4);
    CHECK(locate(master, {1}, kLocatePrefix, 2).empty());
    CHECK(locate(master, {}).empty());
    b.disconnect();
    CHECK(locate(master, {1}) == std::vector<Holders>{{ssd}});
    CHECK(locate(master, {1}, kLocateSuspects) == std::vector<Holders>{{dram, ssd}});
}

TEST_CASE("master: a row that makes no sense ends the connection, not the master") {
    Master master({}, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    std::string rows = rows_of({1});
    rows.back() = 0x7F;
    CHECK_FALSE(master.delta(0, a.id, 1, 0, 0, rows));
    CHECK(master.check_integrity());
}

TEST_CASE("master: what was removed while a node was away is dropped when it is back") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.hold({1, 2, 3});
    a.inventory(0);
    b.put(0, 1);
    b.inventory(0);
    a.disconnect();
    b.remove(100, 1);                                       // the client reaches b itself,
    CHECK(master.forget(100, hashes_of({1, 7}), {}) == 1);  // and cannot reach a
    CHECK(locate(master, {1}, kLocateSuspects) == std::vector<std::vector<Holder>>{{}});
    CHECK(locate(master, {2}, kLocateSuspects)[0].size() == 1);

    SUBCASE("the same process, back before it was given up") {
        a.join(20000, 3);
        CHECK(locate(master, {1})[0].empty());
        a.inventory(20000);
        CHECK(a.keys() == std::set<uint64_t>{2, 3});
    }
    SUBCASE("the same process, back after it was given up") {
        for (uint64_t now = 200; now < 40000; now += 100) {
            b.beat(now);
            master.tick(now);
        }
        CHECK(locate(master, {2}, kLocateSuspects)[0].empty());
        a.join(40000, 3);
        a.inventory(40000);
        CHECK(a.keys() == std::set<uint64_t>{2, 3});
    }
    SUBCASE("a new process with the old content of its disk") {
        a.life = 2;
        a.join(5000, 3);
        a.inventory(5000);
        CHECK(a.keys() == std::set<uint64_t>{2, 3});
    }
    CHECK(locate(master, {1})[0].empty());
    CHECK(locate(master, {2})[0].size() == 1);
    CHECK(master.drops(a.id).empty());
}

TEST_CASE("master: a node that leaves takes its rows along, and drops later what was removed meanwhile") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.hold({1, 2});
    a.inventory(0);
    b.inventory(0);
    NodeId id = a.id;
    master.left(100, id, 2);  // b's connection does not speak for a
    CHECK(locate(master, {1}, kLocateSuspects)[0].size() == 1);
    a.leave(100);
    CHECK(locate(master, {1, 2}, kLocateSuspects) == std::vector<std::vector<Holder>>{{}, {}});
    CHECK(master.counters().nodes_left_total == 1);
    CHECK_FALSE(master.current(id, 1));
    CHECK(master.forget(200, hashes_of({1}), {}) == 0);
    a.life = 2;
    REQUIRE(a.join(300, 3));
    a.inventory(300);
    CHECK(a.keys() == std::set<uint64_t>{2});
    CHECK(locate(master, {1, 2})[1].size() == 1);
}

TEST_CASE("master: a node in touch that the caller could not reach is told with its next beat") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    a.put(0, 1);
    b.put(0, 1);
    std::vector<NodeId> unreached{a.id};
    CHECK(master.forget(10, hashes_of({1}), unreached) == 1);
    CHECK(locate(master, {1})[0] == std::vector<Holder>{{b.id, Tier::kDram}});  // was told by the caller
    a.beat(20);
    CHECK(a.keys().empty());
}

TEST_CASE("master: a key that was put again after its removal stays") {
    Master master({}, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    a.inventory(0);
    a.put(0, 1);
    a.remove(10, 1);
    CHECK(master.forget(10, hashes_of({1}), {}) == 0);
    a.put(20, 1);
    a.beat(30);
    a.beat(40);
    CHECK(a.keys().contains(1));
    CHECK(locate(master, {1})[0].size() == 1);
}

TEST_CASE("master: a removal during an inventory reaches what is not told yet") {
    Master master({}, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    a.hold({1, 2});
    REQUIRE(master.delta(0, a.id, 1, kDeltaBegin, a.applied, rows_of({1})));
    master.forget(10, hashes_of({1, 2}), {});
    REQUIRE(master.delta(20, a.id, 1, kDeltaEnd, a.applied, rows_of({2})));
    a.beat(30);
    a.beat(40);
    CHECK(a.keys().empty());
    CHECK(locate(master, {1, 2}) == std::vector<std::vector<Holder>>{{}, {}});
}

TEST_CASE("master: where removals are not remembered back to a node's return, its older copies are void") {
    MasterLimits limits;
    limits.removals_max = 4;
    limits.grace_ms = 0;
    Master master(limits, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.hold({1, 2});
    a.join(0, 1);
    a.inventory(0);
    a.disconnect();
    for (uint64_t key = 10; key < 20; ++key) master.forget(3000 + key, hashes_of({key}), {});
    a.put(3050, 3);  // by a client that had heard of all these
    b.hold({5});
    b.join(5000, 2);  // it never heard of any
    CHECK(b.keys().empty());
    a.join(6000, 3);
    CHECK(a.keys() == std::set<uint64_t>{3});
    a.inventory(6000);
    b.inventory(6000);
    CHECK(master.counters().drop_alls_total == 2);
    CHECK(locate(master, {1, 5}) == std::vector<std::vector<Holder>>{{}, {}});
    CHECK(locate(master, {3})[0].size() == 1);
}

TEST_CASE("master: a node that holds nothing is told of nothing, however long ago its life began") {
    MasterLimits limits;
    limits.removals_max = 4;
    Master master(limits, 0, kFirst);
    for (uint64_t key = 10; key < 20; ++key) master.forget(key, hashes_of({key}), {});
    Node a{master, "a"};
    a.join(100, 1);
    CHECK(master.drops(a.id).empty());
    CHECK(a.applied == master.newest());
    a.inventory(100);
    a.put(110, 10);
    CHECK(locate(master, {10})[0].size() == 1);
}

TEST_CASE("master: it says so as long as somebody may have yet to tell what it holds") {
    Master master(MasterLimits{}, 0, kFirst);
    Node a{master, "a"};
    CHECK(master.filling(4000));
    a.join(4000, 1);
    CHECK(master.filling(5500));
    a.inventory(5500);
    CHECK_FALSE(master.filling(5500));
    a.disconnect();
    CHECK_FALSE(master.filling(6000));
    a.join(6500, 2);
    CHECK(master.filling(6500));
    a.inventory(6500);
    CHECK_FALSE(master.filling(6500));
}

// What order() says: the first version, and the holders of each key.
struct OrderedKeys {
    Version first;
    std::vector<std::vector<NodeId>> holders;
};
OrderedKeys order(Master& master, uint64_t now, const std::vector<uint64_t>& keys, NodeId placing = kNoNode) {
    std::vector<std::byte> out;
    Writer w(out);
    OrderedKeys ordered{master.order(now, hashes_of(keys), placing, w), {}};
    Reader r{std::span<const std::byte>(out)};
    ordered.holders.resize(r.number<uint32_t>());
    for (auto& holders : ordered.holders) {
        holders.resize(r.number<uint8_t>());
        for (NodeId& node : holders) {
            node = r.number<NodeId>();
            r.number<uint8_t>();
        }
    }
    REQUIRE(r.done());
    return ordered;
}

// Ends it: of each key the last version.
std::vector<Version> end_order(Master& master, uint64_t now, const std::vector<uint64_t>& keys, Version first,
                               const std::vector<std::vector<NodeId>>& told,
                               std::vector<std::vector<NodeId>> placed = {}) {
    OrderDone done{{}, {}, master.membership().epoch(), told, std::move(placed)};
    done.told.resize(keys.size());
    done.placed.resize(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
        done.keys.push_back(hash_of(keys[i]));
        done.versions.push_back(first + i);
    }
    std::vector<std::byte> frame, out;
    Writer w(frame), answer(out);
    OrderedFrame(done, 0, keys.size()).write(w);
    Reader body{std::span<const std::byte>(frame)};
    std::optional<Ordered> read = Ordered::read(body);
    REQUIRE(read);
    master.ordered(now, *read, answer);
    Reader r{std::span<const std::byte>(out)};
    std::vector<Version> last(r.number<uint32_t>());
    for (Version& version : last) version = r.number<Version>();
    REQUIRE(r.done());
    return last;
}

// A place in the order for keys that are put where no node has them.
std::pair<Version, std::vector<Taken>> ask_unique(Master& master, uint64_t now,
                                                  const std::vector<uint64_t>& keys, NodeId placing) {
    std::vector<std::byte> out;
    Writer w(out);
    std::vector<Taken> taken;
    Version first = master.order(now, hashes_of(keys), placing, w, &taken);
    return {first, taken};
}

TEST_CASE("master: of clients that put a key where no node has it one has the key") {
    MasterLimits limits;
    limits.grace_ms = 0;
    Master master(limits, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    b.put(0, 1);
    auto ask = [&](uint64_t now, const std::vector<uint64_t>& keys, const Node& placing) {
        return ask_unique(master, now, keys, placing.id);
    };
    auto [first, taken] = ask(10, {1, 2}, a);
    CHECK(taken == std::vector{Taken::kHeld, Taken::kNew});
    CHECK(ask(11, {2}, b).second == std::vector{Taken::kBeingPut});
    (void)end_order(master, 12, {1, 2}, first, {{}, {a.id}}, {{}, {a.id}});
    CHECK(locate(master, {1})[0].size() == 1);  // what was held is as it was
    // Its row is on its way: a client that looked for it would find no holder.
    CHECK(ask(13, {2}, b).second == std::vector{Taken::kBeingPut});
    a.put(14, 2);
    CHECK(ask(14, {2}, b).second == std::vector{Taken::kHeld});
    // A removal frees it, once its holder has told of it. The key stays in the order of removals.
    OrderedKeys removal = order(master, 20, {1, 2});
    b.remove(21, 1);
    (void)end_order(master, 22, {1, 2}, removal.first, {{b.id}, {a.id}});
    CHECK(ask(22, {1, 2}, b).second == std::vector{Taken::kFree, Taken::kHeld});
    a.remove(22, 2);
    // One that could not put it lets go of it.
    auto [second, free] = ask(23, {3}, a);
    CHECK(free == std::vector{Taken::kNew});
    (void)end_order(master, 23, {3}, second, {{}});
    CHECK(ask(23, {3}, b).second == std::vector{Taken::kNew});
    // What another node puts by itself stays.
    b.put(23, 3);
    CHECK(locate(master, {3})[0].size() == 1);
    // A client that ended half way holds it up for a few seconds.
    CHECK(ask(24, {1}, b).second == std::vector{Taken::kBeingPut});
    master.tick(23 + MasterLimits{}.placed_ms);
    CHECK(ask(24 + MasterLimits{}.placed_ms, {1}, b).second == std::vector{Taken::kFree});
    // What its node evicts at once is free when no row can be on its way any more.
    uint64_t now = 25 + MasterLimits{}.placed_ms;
    auto [third, evicted] = ask(now, {4}, a);
    CHECK(evicted == std::vector{Taken::kNew});
    (void)end_order(master, now, {4}, third, {{a.id}}, {{a.id}});
    a.put(now, 4);
    a.remove(now, 4);
    CHECK(ask(now + 1, {4}, b).second == std::vector{Taken::kBeingPut});
    CHECK(ask(now + 1400, {4}, b).second == std::vector{Taken::kNew});
    CHECK(master.check_integrity());
}

TEST_CASE("master: the end of a put that met another one's value leaves that as it is") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    b.put(0, 1);
    OrderedKeys removal = order(master, 10, {1});
    b.remove(11, 1);
    (void)end_order(master, 12, {1}, removal.first, {{b.id}});
    a.applied = removal.first;  // which its beat has yet to say
    a.put(13, 1);
    REQUIRE(locate(master, {1})[0].size() == 1);
    auto [first, taken] = ask_unique(master, 14, {1}, b.id);
    CHECK(taken == std::vector{Taken::kHeld});
    (void)end_order(master, 15, {1}, first, {{}});
    CHECK(locate(master, {1})[0].size() == 1);
    CHECK(master.check_integrity());
}

TEST_CASE("master: a copy that is told of within a removal is its client's to remove, until the end of it") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    OrderedKeys removal = order(master, 10, {1, 2});
    a.hold({1, 2});
    b.hold({1});
    REQUIRE(master.delta(11, a.id, a.link, 0, a.applied, rows_of({1, 2})));
    REQUIRE(master.delta(11, b.id, b.link, 0, b.applied, rows_of({1})));
    a.beat(12);
    CHECK(a.keys().size() == 2);  // the client would hear that it had none
    (void)end_order(master, 13, {1, 2}, removal.first, {{a.id}, {}});
    CHECK(locate(master, {1})[0].size() == 1);
    CHECK(locate(master, {2})[0].empty());
    a.remove(14, 1);
    a.beat(15);
    b.beat(15);
    CHECK(a.keys().empty());
    CHECK(b.keys().empty());
    CHECK(locate(master, {1})[0].empty());
}

TEST_CASE("master: a node that joins within a removal has its copy until the end of it") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.hold({1, 2});
    a.inventory(0);
    b.inventory(0);
    OrderedKeys removal = order(master, 10, {1, 2});
    a.disconnect();
    a.join(11, 3);
    a.inventory(11);
    CHECK(a.keys().size() == 2);  // the client would hear that it had none
    (void)end_order(master, 13, {1, 2}, removal.first, {{a.id}, {}});
    CHECK(locate(master, {2})[0].empty());
    a.remove(14, 1);
    a.beat(15);
    CHECK(a.keys().empty());
    CHECK(locate(master, {1})[0].empty());
}

TEST_CASE("master: a key that is put because no node has it takes the place of copies that were away") {
    MasterLimits limits;
    limits.grace_ms = 0;
    Master master(limits, 0, kFirst);
    Node a{master, "a"}, b{master, "b"}, c{master, "c"};
    a.join(0, 1);
    b.join(0, 2);
    c.join(0, 3);
    a.inventory(0);
    b.inventory(0);
    c.put(0, 1);
    c.inventory(0);
    master.disconnected(c.id, c.link);
    auto [first, taken] = ask_unique(master, 10, {1}, a.id);
    CHECK(taken == std::vector{Taken::kFree});
    (void)end_order(master, 11, {1}, first, {{a.id}}, {{a.id}});
    a.put(12, 1);
    b.put(12, 1);  // by a client that has not heard of it
    CHECK(locate(master, {1})[0].size() == 2);
    c.join(20, 4);
    c.inventory(20);
    c.beat(21);
    CHECK(c.keys().empty());
    CHECK(locate(master, {1})[0].size() == 2);
    CHECK(master.check_integrity());
}

TEST_CASE("master: a copy that is told of after the removal is dropped, but by nodes that know of it") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    a.hold({1});  // put a moment ago: the row is on its way
    b.put(0, 1);
    OrderedKeys removal = order(master, 10, {1});
    CHECK(removal.holders == std::vector<std::vector<NodeId>>{{b.id}});
    b.remove(11, 1);
    CHECK(end_order(master, 12, {1}, removal.first, {{b.id}}) == std::vector<Version>{removal.first});
    REQUIRE(master.delta(13, a.id, a.link, 0, a.applied, rows_of({1})));
    CHECK(locate(master, {1})[0].empty());
    a.beat(20);
    CHECK(a.keys().empty());
    b.put(30, 1);  // it was told, so this one is newer
    CHECK(locate(master, {1})[0].size() == 1);
    // And once a node is right up to there, all it puts is.
    a.beat(40);
    CHECK(a.applied >= removal.first);
    a.put(50, 1);
    CHECK(locate(master, {1})[0].size() == 2);
}

TEST_CASE("master: a copy that a removal voided is void while a later one is open") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    a.hold({1});  // as put before the first removal, and told of after it
    OrderedKeys first = order(master, 10, {1}), second{};
    SUBCASE("that began after the end of the first") {
        end_order(master, 11, {1}, first.first, {{b.id}});
        second = order(master, 12, {1});
    }
    SUBCASE("that began before the end of the first") {
        second = order(master, 11, {1});
        end_order(master, 12, {1}, first.first, {{b.id}});
    }
    REQUIRE(master.delta(13, a.id, a.link, 0, a.applied, rows_of({1})));
    CHECK(locate(master, {1})[0].empty());
    a.beat(14);
    CHECK(a.keys().empty());
    end_order(master, 15, {1}, second.first, {{b.id}});
    CHECK(locate(master, {1})[0].empty());
}

TEST_CASE("master: a copy that was put by a client that knew of the removal stays") {
    Master master({}, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    a.inventory(0);
    OrderedKeys removal = order(master, 10, {1});
    end_order(master, 11, {1}, removal.first, {});
    a.put(12, 1);  // a has not heard of it, its client has
    CHECK(locate(master, {1})[0].empty());
    a.beat(20);  // is told to drop what is older, and has none
    CHECK(a.keys() == std::set<uint64_t>{1});
    a.beat(30);
    CHECK(locate(master, {1})[0].size() == 1);
}

TEST_CASE("master: of two replacements of a key at the same time the later one is left") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    OrderedKeys first = order(master, 10, {1}, a.id);
    OrderedKeys second = order(master, 10, {1}, b.id);
    CHECK(first.holders[0].empty());
    CHECK(second.holders == std::vector<std::vector<NodeId>>{{a.id}});  // where the first is to come
    b.held[1] = second.first;
    CHECK(end_order(master, 11, {1}, second.first, {{b.id}}, {{b.id}}) == std::vector<Version>{second.first});
    a.held[1] = first.first;
    CHECK(end_order(master, 12, {1}, first.first, {{a.id}}, {{a.id}}) == std::vector<Version>{second.first});
    for (Node* node : {&a, &b}) {
        REQUIRE(master.delta(13, node->id, node->link, 0, node->applied, rows_of({1})));
        node->beat(20);
        node->beat(30);
    }
    CHECK(a.keys().empty());
    CHECK(b.keys() == std::set<uint64_t>{1});
    CHECK(locate(master, {1})[0] == std::vector<Holder>{{b.id, Tier::kDram}});
}

TEST_CASE("master: what a node stores of an overtaken replacement goes while it waits for a later one") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    b.join(0, 2);
    a.inventory(0);
    b.inventory(0);
    OrderedKeys overtaken = order(master, 10, {1}, a.id);
    OrderedKeys second = order(master, 11, {1}, b.id);
    b.held[1] = second.first;
    end_order(master, 12, {1}, second.first, {{b.id}}, {{b.id}});
    end_order(master, 12, {1}, overtaken.first, {}, {});
    OrderedKeys third = order(master, 13, {1}, a.id);
    a.held[1] = overtaken.first;  // the frame had waited
    REQUIRE(master.delta(14, a.id, a.link, 0, a.applied, rows_of({1})));
    a.beat(20);
    CHECK(a.keys().empty());
    a.held[1] = third.first;
    REQUIRE(master.delta(21, a.id, a.link, 0, a.applied, rows_of({1})));
    a.beat(30);
    end_order(master, 31, {1}, third.first, {{a.id}}, {{a.id}});
    a.beat(40);
    CHECK(a.keys() == std::set<uint64_t>{1});
    CHECK(locate(master, {1})[0].front() == Holder{a.id, Tier::kDram});
}

TEST_CASE("master: a client that ends between the two frames of a removal leaves no copy") {
    Master master({}, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    a.inventory(0);
    a.put(0, 1);
    Version before = master.newest();
    Version removed = order(master, 10, {1}).first;
    CHECK(master.closed() == before);
    for (uint64_t now = 20; now < 5000; now += 100) {
        a.beat(now);
        master.tick(now);
    }
    CHECK(master.counters().orders_expired_total == 1);
    CHECK(a.keys().empty());
    CHECK(a.applied >= removed);
}

TEST_CASE("master: a node is not read before it has dropped what it had missed") {
    MasterLimits limits;
    limits.grace_ms = 0;
    Master master(limits, 0, kFirst);
    Node a{master, "a"};
    a.hold({1, 2, 3, 4});
    a.join(0, 1);
    a.inventory(0);
    a.disconnect();
    master.forget(10, hashes_of({1, 2, 3}), {});
    a.join(20, 2);  // two drops with each answer
    REQUIRE(master.delta(20, a.id, a.link, kDeltaBegin | kDeltaEnd, a.applied, rows_of(a.key_list())));
    CHECK(master.membership().state(a.id) == MemberState::kJoining);
    CHECK(locate(master, {4})[0].empty());
    CHECK(locate(master, {4}, kLocateSuspects)[0].size() == 1);
    a.beat(30);
    a.beat(40);
    CHECK(master.membership().state(a.id) == MemberState::kAlive);
    CHECK(locate(master, {4})[0].size() == 1);
    CHECK(a.keys() == std::set<uint64_t>{4});
    CHECK(master.check_integrity());
}

TEST_CASE(
    "master: a node that another process goes on with is read meanwhile, and no removed key comes back") {
    MasterLimits limits;
    limits.grace_ms = 0;
    Master master(limits, 0, kFirst);
    Node a{master, "a"};
    a.hold({1, 2, 3, 4});
    a.join(0, 1);
    a.inventory(0);
    const NodeId unreached[] = {a.id};
    master.forget(10, hashes_of({1, 2, 3}), unreached);
    a.join(20, 2);  // the connection before it stands; two drops with each answer
    CHECK(master.membership().state(a.id) == MemberState::kAlive);
    CHECK(locate(master, {4})[0].size() == 1);
    REQUIRE(master.delta(20, a.id, a.link, kDeltaBegin | kDeltaEnd, a.applied, rows_of(a.key_list())));
    for (uint64_t key : {1, 2, 3}) CHECK(locate(master, {key})[0].empty());
    CHECK(locate(master, {4})[0].size() == 1);
    a.beat(30);
    a.beat(40);
    CHECK(a.keys() == std::set<uint64_t>{4});
    CHECK(master.check_integrity());
}

TEST_CASE("master: a new master hears of removals from the nodes, and drops what was away meanwhile") {
    Master former({}, 0, kFirst);
    Version removed = order(former, 10, {1}).first;
    Master master({}, 0, first_version(5000));
    Node knows{master, "a"}, was_away{master, "b"};
    knows.hold({7});
    was_away.hold({1, 2});
    knows.applied = removed;
    std::vector<Drop> log{{hash_of(1), removed}};
    auto hand_over = [&] { master.removals(20, knows.id, knows.link, kNoVersion, log); };
    SUBCASE("before it is back") {
        knows.join(10, 1);
        hand_over();
        was_away.join(30, 2);
        CHECK(was_away.keys() == std::set<uint64_t>{2});
    }
    SUBCASE("after it has told what it holds") {
        was_away.join(10, 2);
        was_away.inventory(10);
        CHECK(locate(master, {1})[0].size() == 1);  // no process knows yet
        knows.join(15, 1);
        hand_over();
        CHECK(locate(master, {1})[0].empty());
        was_away.beat(30);
    }
    SUBCASE("while its rows are on their way") {
        was_away.join(10, 2);
        CHECK(was_away.applied > removed);  // up to there it was told all that this master knew
        knows.join(15, 1);
        hand_over();
        was_away.inventory(20);
    }
    was_away.beat(40);
    CHECK(was_away.keys() == std::set<uint64_t>{2});
    CHECK(locate(master, {1})[0].empty());
}

TEST_CASE("master: what a node brings from its disk is not read in a new master's first second") {
    Master master({}, 5000, kFirst);
    Node restarted{master, "a"}, lived_on{master, "b"}, later{master, "c"};
    for (Node* node : {&restarted, &lived_on, &later}) node->hold({1});
    restarted.recovered = later.recovered = true;
    restarted.join(5010, 1);
    restarted.inventory(5010);
    lived_on.join(5010, 2);
    lived_on.inventory(5010);
    CHECK(locate(master, {1})[0] == std::vector<Holder>{{lived_on.id, Tier::kDram}});
    CHECK(locate(master, {1}, kLocateSuspects)[0].size() == 2);
    master.tick(5990);
    CHECK(master.membership().state(restarted.id) == MemberState::kJoining);
    master.tick(6000);
    CHECK(master.membership().state(restarted.id) == MemberState::kAlive);
    later.join(6010, 3);
    later.inventory(6010);
    CHECK(locate(master, {1})[0].size() == 3);
}

TEST_CASE("master: a node that knows later versions than this master gives moves it on") {
    Master master({}, 0, kFirst);
    Node a{master, "a"}, b{master, "b"};
    a.join(0, 1);
    a.inventory(0);
    a.held[1] = first_version(9000) + 5;  // of a master whose clock was ahead
    Version removed = order(master, 10, {1}).first;
    end_order(master, 10, {1}, removed, {});
    b.hold({2});
    b.applied = first_version(9000) + 7;
    b.join(20, 2);
    CHECK(master.newest() > first_version(9000) + 7);
    REQUIRE(master.delta(20, a.id, a.link, 0, a.applied, rows_of({1})));
    a.beat(30);
    CHECK(a.keys().empty());
    CHECK(order(master, 40, {2}).first > first_version(9000) + 7);
}

TEST_CASE("master: a node of the release before is served as that one was") {
    Master master({}, 0, kFirst);
    NodeIdentity who;
    who.name = "old";
    who.host_id = "h";
    who.incarnation.fill(9);
    Result<Master::JoinAnswer> joined = master.join(0, who, {}, 1, std::nullopt);
    REQUIRE(joined);
    REQUIRE(master.delta(0, joined->id, 1, kDeltaBegin | kDeltaEnd, 0, rows_of({1})));
    CHECK(locate(master, {1})[0].size() == 1);
    master.forget(10, hashes_of({1}), {});
    CHECK(locate(master, {1})[0].size() == 1);  // in touch: its client tells it
    REQUIRE(master.delta(20, joined->id, 1, 0, 0, rows_of({1}, false)));
    REQUIRE(master.delta(30, joined->id, 1, 0, 0, rows_of({1})));  // put anew
    CHECK(locate(master, {1})[0].size() == 1);
    CHECK(master.drops(joined->id).empty());
    master.disconnected(joined->id, 1);
    master.forget(40, hashes_of({1}), {});
    CHECK(locate(master, {1}, kLocateSuspects)[0].empty());
    CHECK(master.drops(joined->id).items().size() == 1);
}

TEST_CASE("master: too many drops for one node become one") {
    MasterLimits limits;
    limits.drops_max = 3;
    Master master(limits, 0, kFirst);
    Node a{master, "a"};
    a.join(0, 1);
    a.inventory(0);
    for (uint64_t key = 0; key < 9; ++key) a.put(0, key);
    master.forget(10, hashes_of({0, 1, 2, 3}), std::vector<NodeId>{a.id});
    a.beat(20);
    CHECK(a.keys().empty());
    a.put(30, 50);
    a.beat(40);
    a.beat(50);
    CHECK(a.keys() == std::set<uint64_t>{50});
}

// Clients put, remove and lose touch with nodes at random. Whenever a node has been back for two beats, it
// holds no key that was removed everywhere and not put again, and nobody is ever sent to such a copy.
TEST_CASE("master: no stale copy survives, whatever the order") {
    Random random(3);
    MasterLimits limits;
    limits.removals_max = 40;
    limits.drops_max = 6;
    limits.grace_ms = 2000;
    limits.membership.gone_ms = 3000;
    Master master(limits, 1000, kFirst);
    std::vector<Node> nodes{{master, "a"}, {master, "b"}, {master, "c"}};
    LinkId link = 0;
    uint64_t now = 1000;
    // (node, key) -> whether that copy is void: it was there when its key was removed.
    std::map<std::pair<size_t, uint64_t>, bool> is_void;
    auto sync = [&] {
        for (size_t i = 0; i < nodes.size(); ++i) {
            std::erase_if(is_void, [&](const auto& entry) {
                return entry.first.first == i && !nodes[i].held.contains(entry.first.second);
            });
        }
    };
    constexpr int kSteps = testing::kUnderTsan ? 500 : 5000;
    for (int step = 0; step < kSteps; ++step) {
        now += random.below(40);
        size_t i = random.below(nodes.size());
        Node& node = nodes[i];
        uint64_t key = random.below(30);
        switch (random.below(12)) {
            case 0:
                if (random.one_in(4) && node.link != kNoLink) {
                    if (random.one_in(3)) {
                        node.leave(now);  // and comes back with its disk
                    } else {
                        node.disconnect();
                    }
                }
                break;
            case 1:
                if (node.link == kNoLink) {
                    if (random.one_in(5)) ++node.life;  // restarted, with its disk
                    if (node.join(now, ++link)) node.inventory(now);
                }
                break;
            case 2:
            case 3: {
                // Removed by a client that reaches every node in touch, or says which it does not.
                std::vector<NodeId> unreached;
                for (size_t k = 0; k < nodes.size(); ++k) {
                    bool reached = nodes[k].link != kNoLink && !random.one_in(4);
                    if (reached) {
                        nodes[k].remove(now, key);
                    } else {
                        if (nodes[k].link != kNoLink) unreached.push_back(nodes[k].id);
                        if (nodes[k].held.contains(key)) is_void[{k, key}] = true;
                    }
                }
                master.forget(now, hashes_of({key}), unreached);
                break;
            }
            case 4:
                for (int t = 0; t < 30; ++t) {
                    now += 50;
                    for (Node& other : nodes) {
                        if (other.link != kNoLink) other.beat(now);
                    }
                    master.tick(now);
                }
                break;
            default:
                if (node.link != kNoLink) {
                    node.put(now, key);
                    is_void.erase({i, key});
                }
        }
        master.tick(now);
        for (size_t k = 0; k < nodes.size(); ++k) {
            // Given up while its link was there: it hears of it with its next frame.
            if (nodes[k].link != kNoLink && !master.current(nodes[k].id, nodes[k].link)) {
                nodes[k].link = kNoLink;
            }
        }
        sync();
        for (auto& [copy, stale] : is_void) {
            auto found = locate(master, {copy.second}, kLocateSuspects);
            for (Holder holder : found[0]) REQUIRE(holder.node != nodes[copy.first].id);
        }
        if (random.one_in(20)) {
            for (Node& other : nodes) {
                if (other.link == kNoLink) continue;
                for (int beat = 0; beat < 6; ++beat) other.beat(now);  // two hashes with each answer
            }
            sync();
            for (auto& [copy, stale] : is_void) REQUIRE(nodes[copy.first].link == kNoLink);
        }
        if (step % 50 == 0) REQUIRE(master.check_integrity());
    }
    CHECK(master.counters().drops_total > kSteps / 200);
}

}  // namespace
}  // namespace moonpool
