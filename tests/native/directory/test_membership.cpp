#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>

#include "../random.hpp"
#include "directory/membership.hpp"

namespace moonpool {
namespace {

using testing::Random;

NodeIdentity identity(const std::string& name, uint8_t life, const std::string& host = "h1") {
    NodeIdentity who;
    who.name = name;
    who.host_id = host;
    who.incarnation.fill(life);
    who.address = "127.0.0.1:1";
    return who;
}

NodeLoad load(uint64_t free_bytes, uint64_t arena = 1000, uint64_t age = 0) {
    return NodeLoad{{TenantLoad{"default", arena, free_bytes, 0, age}}, 0, 0};
}

bool any(NodeId) { return true; }

NodeId joined(Membership& m, uint64_t now, const NodeIdentity& who, LinkId link,
              const NodeLoad& l = load(500)) {
    Result<Membership::Joined> result = m.join(now, who, l, link, any);
    REQUIRE(result);
    REQUIRE(m.check_integrity());
    return result->id;
}

TEST_CASE("membership: silence makes a suspect, a word makes it alive again, long silence ends its life") {
    Membership m({});
    NodeId a = joined(m, 0, identity("a", 1), 1);
    m.tick(0);
    uint64_t epoch = m.epoch();
    for (uint64_t now = 100; now < 1000; now += 100) CHECK(m.tick(now).empty());
    CHECK(m.alive(a));
    CHECK(m.epoch() == epoch);
    m.tick(1000);
    CHECK_FALSE(m.alive(a));
    CHECK(m.epoch() != epoch);
    m.heard(1100, a, 1);
    CHECK(m.alive(a));
    uint64_t gone_at = 0;
    for (uint64_t now = 1100; now < 40000 && gone_at == 0; now += 100) {
        if (m.tick(now) == std::vector<NodeId>{a}) gone_at = now;
    }
    CHECK(gone_at == 31100);
    CHECK(m.size() == 0);
    CHECK(m.past().front().heard_ms == 1100);
    CHECK(m.check_integrity());
}

TEST_CASE("membership: a node whose event endpoints are unfit joins without them") {
    Membership m({});
    NodeIdentity who = identity("a", 1);
    who.events = "tcp://10.0.0.1:5559";
    who.events_replay = "tcp://10.0.0.1:" + std::string(300, '5');
    joined(m, 0, who, 1);
    REQUIRE(m.current(2).rows.size() == 1);
    CHECK(m.current(2).rows[0].identity.events.empty());
    CHECK(m.current(2).rows[0].identity.events_replay.empty());
    who.events_replay = "tcp://10.0.0.1:5560";
    joined(m, 1, who, 2);
    CHECK(m.current(2).rows[0].identity.events == "tcp://10.0.0.1:5559");
    CHECK(m.current(2).rows[0].identity.events_replay == who.events_replay);
    who.events = "tcp://10.0.0.1\n";
    joined(m, 2, who, 3);
    CHECK(m.current(2).rows[0].identity.events.empty());
}

TEST_CASE("membership: a broken connection makes a suspect at once, but not that of an older link") {
    Membership m({});
    NodeId a = joined(m, 0, identity("a", 1), 1);
    Result<Membership::Joined> again = m.join(10, identity("a", 1), load(5), 2, any);
    REQUIRE(again);
    CHECK(again->resumed);
    CHECK(again->id == a);
    CHECK(again->old_link == 1);
    m.disconnected(a, 1);
    CHECK(m.alive(a));
    m.disconnected(a, 2);
    CHECK_FALSE(m.alive(a));
    m.heard(20, a, 2);  // read from what was left of it
    CHECK_FALSE(m.alive(a));
    CHECK(m.check_integrity());
}

TEST_CASE("membership: who says that it leaves is gone at once, and may join again") {
    Membership m({});
    NodeId a = joined(m, 0, identity("a", 1), 1), b = joined(m, 0, identity("b", 1), 2);
    uint64_t epoch = m.epoch();
    CHECK_FALSE(m.left(50, a, 2));  // a connection that is another's
    CHECK(m.epoch() == epoch);
    CHECK(m.left(50, a, 1));
    CHECK(m.epoch() != epoch);
    CHECK(m.check_integrity());
    CHECK_FALSE(m.alive(a));
    CHECK(m.alive(b));
    CHECK(m.size() == 1);
    CHECK(m.past().back().heard_ms == 50);
    CHECK_FALSE(m.left(60, a, 1));
    m.disconnected(a, 1);
    CHECK(m.suspects() == 0);
    Result<Membership::Joined> again = m.join(70, identity("a", 1), load(5), 3, any);
    REQUIRE(again);
    CHECK_FALSE(again->resumed);
    CHECK(again->heard_ms == 50);
}

TEST_CASE("membership: a new life takes the place of a suspect one and fences it") {
    Membership m({});
    NodeId old_id = joined(m, 0, identity("a", 1), 1);
    Result<Membership::Joined> refused = m.join(10, identity("a", 2), load(5), 2, any);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().text.find("node.name") != std::string::npos);
    CHECK(m.join(10, identity("a", 2, "h2"), load(5), 2, any)->id != old_id);  // another host: another member
    m.disconnected(old_id, 1);
    Result<Membership::Joined> taken = m.join(20, identity("a", 3), load(5), 3, any);
    REQUIRE(taken);
    CHECK(taken->replaced == old_id);
    CHECK(taken->heard_ms == 0);
    CHECK_FALSE(taken->resumed);
    CHECK(taken->id != old_id);
    for (int i = 0; i < 2; ++i) {
        CHECK_FALSE(m.join(30, identity("a", 1), load(5), 4, any));  // the old process is back
        m.disconnected(taken->id, 3);
    }
    CHECK(m.check_integrity());
}

TEST_CASE("membership: a number is not given away while its rows are there") {
    Membership m({});
    Result<Membership::Joined> result =
        m.join(0, identity("a", 1), load(5), 1, [](NodeId id) { return id >= 5; });
    CHECK(result->id == 5);
    CHECK_FALSE(m.join(0, identity("b", 1), load(5), 2, [](NodeId) { return false; }));
}

TEST_CASE("membership: the limit of nodes rises, as far as there are numbers") {
    Membership m({.members_max = 2, .members_most = 5});
    joined(m, 0, identity("a", 1), 1);
    joined(m, 0, identity("b", 2), 2);
    CHECK(m.limit().raised_total() == 0);
    for (uint8_t i = 3; i <= 5; ++i) {
        joined(m, 0, identity(std::to_string(i), i), i);
        CHECK(m.limit().now() == (i == 5 ? 5 : 4));
    }
    CHECK(m.limit().raised_total() == 2);
    Result<Membership::Joined> sixth = m.join(0, identity("f", 6), load(5), 6, any);
    REQUIRE_FALSE(sixth);
    CHECK(sixth.error().code == Code::kTooLarge);
    CHECK(sixth.error().text.find("another master") != std::string::npos);
    CHECK(m.join(0, identity("a", 1), load(5), 7, any)->resumed);  // is in already
    CHECK(m.check_integrity());
}

TEST_CASE("membership: a master that stood still does not blame its members") {
    Membership m({});
    NodeId a = joined(m, 0, identity("a", 1), 1);
    m.tick(100);
    m.tick(60000);  // it was stopped for a minute; what the member sent waits in the socket
    CHECK(m.alive(a));
    for (uint64_t now = 60100; now <= 61000; now += 100) m.tick(now);
    CHECK_FALSE(m.alive(a));
}

TEST_CASE("membership: place by free room, on different hosts, then by the age of what would go") {
    Membership m({});
    NodeId a = joined(m, 0, identity("a", 1, "h1"), 1, load(500));
    NodeId b = joined(m, 0, identity("b", 2, "h1"), 2, load(900));
    NodeId c = joined(m, 0, identity("c", 3, "h2"), 3, load(700));
    NodeId d = joined(m, 0, identity("d", 4, "h3"), 4, load(0, 1000, 50));
    NodeId e = joined(m, 0, identity("e", 5, "h4"), 5, load(0, 1000, 90));
    using Ids = std::vector<NodeId>;
    CHECK(m.place("default", 100, 3, {}, {}, false) == Ids{b, c});
    CHECK(m.place("default", 650, 1, {}, {}, false) == Ids{b});  // 800 are left
    CHECK(m.place("default", 650, 1, {}, {}, false).empty());    // promised before its next beat
    m.beat(1, b, 2, load(900));
    CHECK(m.place("default", 100, 5, {b}, {}, true) == Ids{c, a, e, d});
    CHECK(m.place("default", 100, 1, {}, {"h1"}, false) == Ids{c});
    CHECK(m.place("other", 1, 1, {}, {}, true).empty());
    CHECK(m.place("default", 2000, 1, {}, {}, true).empty());
    m.disconnected(c, 3);
    CHECK(m.place("default", 100, 1, {}, {"h1"}, false).empty());
}

// The answers of a walk over all members.
std::vector<NodeId> place_slowly(const Members& members, uint64_t bytes, size_t n,
                                 const std::vector<NodeId>& avoid_nodes,
                                 const std::vector<std::string_view>& avoid_hosts, bool evict) {
    struct Choice {
        const Member* member;
        const TenantLoad* load;
        bool has_room;
    };
    std::vector<Choice> choices;
    for (const Member& member : members.rows) {
        const TenantLoad* load = member.load.find("default");
        if (member.state != MemberState::kAlive || load == nullptr || load->arena_bytes < bytes) continue;
        if (std::ranges::find(avoid_nodes, member.id) != avoid_nodes.end()) continue;
        if (std::ranges::find(avoid_hosts, member.identity.host_id) != avoid_hosts.end()) continue;
        bool has_room = load->free_bytes >= bytes + load->arena_bytes / 8;
        if (has_room || evict) choices.push_back({&member, load, has_room});
    }
    auto room = [](const TenantLoad& load) { return load.free_bytes - load.arena_bytes / 8; };
    std::ranges::stable_sort(choices, [&](const Choice& a, const Choice& b) {
        if (a.has_room != b.has_room) return a.has_room;
        return a.has_room ? room(*a.load) > room(*b.load) : a.load->oldest_age_ms > b.load->oldest_age_ms;
    });
    std::vector<NodeId> chosen;
    std::set<std::string_view> hosts;
    for (const Choice& choice : choices) {
        if (chosen.size() < n && hosts.insert(choice.member->identity.host_id).second)
            chosen.push_back(choice.member->id);
    }
    return chosen;
}

TEST_CASE("membership: the nodes that it places at are those of a walk over all of them") {
    Random random(42);
    Membership m({});
    std::map<NodeId, LinkId> links;
    LinkId link = 0;
    auto some_load = [&] {
        NodeLoad l = load(random.below(1001), 1000 * (1 + random.below(2)), random.below(20));
        if (random.one_in(3)) l.tenants.push_back(TenantLoad{"other", 500, random.below(501), 0, 7});
        if (random.one_in(10)) l.tenants.erase(l.tenants.begin());
        return l;
    };
    for (int step = 0; step < 20000; ++step) {
        auto name = static_cast<uint8_t>(random.below(30));
        auto id = static_cast<NodeId>(random.below(35));
        auto it = links.find(id);
        switch (random.below(6)) {
            case 0: {
                Result<Membership::Joined> result =
                    m.join(0, identity(std::to_string(name), 1, "h" + std::to_string(name % 12)), some_load(),
                           ++link, any);
                REQUIRE(result);
                links[result->id] = link;
                break;
            }
            case 1:
                if (it != links.end() && random.one_in(4)) m.disconnected(id, it->second);
                break;
            case 2:
                if (it != links.end() && random.one_in(8)) m.left(0, id, it->second);
                break;
            case 3:
                if (it != links.end()) m.set_joining(id, random.one_in(4));
                break;
            default:
                if (it != links.end()) m.beat(0, id, it->second, some_load());
        }
        std::vector<NodeId> avoid_nodes;
        std::vector<std::string_view> avoid_hosts;
        if (random.one_in(2)) avoid_nodes = {static_cast<NodeId>(random.below(35)), id};
        if (random.one_in(2)) avoid_hosts = {"h3", "h5"};
        uint64_t bytes = random.below(random.one_in(2) ? 100 : 2000);
        size_t n = random.below(5);
        bool evict = random.one_in(2);
        std::vector<NodeId> expected = place_slowly(m.current(0), bytes, n, avoid_nodes, avoid_hosts, evict);
        REQUIRE(m.place("default", bytes, n, avoid_nodes, avoid_hosts, evict) == expected);
        if (step % 16 == 0) REQUIRE(m.check_integrity());
    }
}

// Every sequence of a few events on one name, two lives of it: the invariants hold, and the epoch moves
// whenever what clients see does.
TEST_CASE("membership: all short histories of one member") {
    constexpr int kEvents = 7, kLength = 6;
    int histories = 1;
    for (int i = 0; i < kLength; ++i) histories *= kEvents;
    for (int history = 0; history < histories; ++history) {
        Membership m({});
        uint64_t now = 0;
        LinkId link = 0;
        std::map<uint8_t, std::pair<NodeId, LinkId>> lives;
        bool fenced[3] = {};
        for (int step = 0, rest = history; step < kLength; ++step, rest /= kEvents) {
            Members before = m.current(now);
            int event = rest % kEvents;
            auto life = static_cast<uint8_t>(1 + event % 2);
            switch (event) {
                case 0:
                case 1: {
                    Result<Membership::Joined> result =
                        m.join(now, identity("a", life), load(1), ++link, any);
                    if (result) {
                        REQUIRE_FALSE(fenced[life]);
                        if (result->replaced) fenced[3 - life] = true;
                        lives[life] = {result->id, link};
                    }
                    break;
                }
                case 2:
                case 3:
                    if (lives.contains(life)) m.disconnected(lives[life].first, lives[life].second);
                    break;
                case 4:
                    if (lives.contains(1)) m.heard(now, lives[1].first, lives[1].second);
                    break;
                case 5:
                    for (int i = 0; i < 11; ++i) m.tick(now += 100);
                    break;
                case 6:
                    for (int i = 0; i < 310; ++i) m.tick(now += 100);
                    break;
            }
            REQUIRE(m.check_integrity());
            REQUIRE(m.size() <= 1);
            Members after = m.current(now);
            bool changed = before.rows.size() != after.rows.size();
            for (size_t i = 0; !changed && i < after.rows.size(); ++i) {
                changed = before.rows[i].id != after.rows[i].id ||
                          before.rows[i].state != after.rows[i].state ||
                          before.rows[i].identity.incarnation != after.rows[i].identity.incarnation;
            }
            if (changed) REQUIRE(after.epoch != before.epoch);
        }
    }
}

TEST_CASE("membership: names that a terminal would obey are refused, and so are long ones") {
    Membership membership({});
    auto usable = [](NodeId) { return true; };
    auto join = [&](const std::string& name, const std::string& host, const std::string& address = "",
                    const std::string& path = "") {
        NodeIdentity who{name, random_incarnation(), host, address, path};
        return membership.join(1000, who, NodeLoad{}, 7, usable);
    };
    CHECK(join("a", "h", "10.0.0.1:7710", "/run/moonpool/node-a.sock").ok());
    CHECK(join(std::string(128, 'n'), std::string(256, 'h')).ok());
    for (const std::string& bad :
         {std::string("evil\x1b[31m"), std::string("two\nlines"), std::string("tab\t"), std::string("\xff"),
          std::string(300, 'x'), std::string(1, '\0')}) {
        CHECK_FALSE(join(bad, "h").ok());
        CHECK_FALSE(join("b", bad).ok());
    }
    CHECK_FALSE(join("", "h").ok());
    CHECK_FALSE(join("b", "h", "10.0.0.1:1\x1b").ok());
    CHECK_FALSE(join("b", "h", "", "/tmp/\x07").ok());
    CHECK(join("b", "\x1b]0;pwned\x07").error().text.find("printable ASCII") != std::string::npos);
    CHECK(membership.size() == 2);
}

}  // namespace
}  // namespace moonpool
