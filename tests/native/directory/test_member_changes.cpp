#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "../random.hpp"
#include "directory/master_protocol.hpp"
#include "directory/members_cache.hpp"

namespace moonpool {
namespace {

using testing::Random;

NodeIdentity identity_of(uint64_t number, uint8_t life) {
    NodeIdentity who;
    who.name = "node-" + std::to_string(number);
    who.host_id = "0123456789abcdef0123456789abcdef-" + std::to_string(number / 2);
    who.incarnation.fill(life);
    who.address = "10.0.0.1:" + std::to_string(10000 + number);
    who.socket_path = "/run/moonpool/node-default.sock";
    who.events = "tcp://10.0.0.1:5559";
    who.events_replay = "tcp://10.0.0.1:5560";
    return who;
}

NodeLoad load_of(uint64_t free_bytes, uint64_t arena = 1000) {
    return NodeLoad{{TenantLoad{"default", arena, free_bytes, 0, 5}}, 0, 0};
}

MasterProtocolHost host_of(Master& master) {
    return {.master = master,
            .beat_ms = 200,
            .close_link = [](LinkId) {},
            .on_leave = {},
            .on_join_refused = {},
            .why_no_orders = {},
            .why_no_ends = {},
            .on_standby = {},
            .on_heard = {},
            .on_standby_left = {},
            .on_hand_over = {}};
}

// A master, and the connection of a client.
struct Bed {
    explicit Bed(const MembershipOptions& options = {})
        : master(limits_with(options), 0, 1),
          protocol(host_of(master), 1000000, Caller::kClient, "default") {}

    static MasterLimits limits_with(const MembershipOptions& options) {
        MasterLimits limits;
        limits.membership = options;
        return limits;
    }
    NodeId join(uint64_t number, uint8_t life) {
        Result<Master::JoinAnswer> joined =
            master.join(now, identity_of(number, life), load_of(500), ++link, UINT64_MAX);
        if (!joined) return kNoNode;
        links[joined->id] = link;
        master.delta(now, joined->id, link, kDeltaBegin | kDeltaEnd, 1, {});
        return joined->id;
    }
    // The answer's body.
    std::vector<std::byte> ask(const std::vector<std::byte>& question) {
        FrameHeader header;
        header.kind = Kind::kMembers;
        std::vector<std::byte> out;
        REQUIRE(protocol.on_frame(now, header, Reader(question), out));
        bytes = out.size();
        return {out.begin() + sizeof(FrameHeader), out.end()};
    }
    void refresh(MembersCache& cache) {
        std::vector<std::byte> question;
        Writer w(question);
        cache.write_question(w);
        std::vector<std::byte> answer = ask(question);
        Reader r(answer);
        REQUIRE(cache.read(now, r));
        CHECK(r.number<Version>() == master.newest());
        CHECK(r.done());
    }

    uint64_t now = 10000;
    LinkId link = 0;
    size_t bytes = 0;  // of the last answer, with its header
    std::map<NodeId, LinkId> links;
    Master master;
    MasterProtocol protocol;
};

bool same(const Members& a, const Members& b) {
    auto equal = [](const Member& x, const Member& y) {
        return x.id == y.id && x.state == y.state && x.identity == y.identity;
    };
    return a.epoch == b.epoch && std::ranges::equal(a.rows, b.rows, equal);
}

TEST_CASE("member changes: clients that ask now and then have the list of the master, however far behind") {
    Random random(41);
    for (uint32_t ends_max : {16384u, 3u}) {
        Bed bed({.members_max = 40, .ends_max = ends_max});
        std::vector<MembersCache> clients(4, MembersCache(0));
        for (int step = 0; step < 6000; ++step) {
            auto node = static_cast<NodeId>(random.below(40));
            bool known = bed.links.contains(node);
            switch (random.below(5)) {
                case 0:
                case 1:
                    bed.join(random.below(40), static_cast<uint8_t>(1 + random.below(3)));
                    break;
                case 2:
                    if (known) bed.master.disconnected(node, bed.links[node]);
                    break;
                case 3:
                    if (known && random.one_in(4)) bed.master.left(bed.now, node, bed.links[node]);
                    break;
                default:
                    bed.now += random.below(200);
                    bed.master.tick(bed.now);
            }
            for (int i = 0; i < 16 && bed.master.sweep(); ++i) {
            }
            // The last ones ask seldom, and are far behind.
            size_t client = random.below(clients.size());
            if (!random.one_in(1 + client * client * 20)) continue;
            if (random.one_in(50)) clients[client].connected();
            bed.refresh(clients[client]);
            REQUIRE(same(*clients[client].current(), bed.master.membership().current(bed.now)));
            if (step % 16 == 0) REQUIRE(bed.master.check_integrity());
        }
    }
}

TEST_CASE("member changes: a client of a large pool hears of the nodes that changed alone") {
    constexpr size_t kNodes = 10000;
    Bed bed({.members_max = kNodes + 1});
    for (size_t i = 0; i < kNodes; ++i) REQUIRE(bed.join(i, 1) != kNoNode);
    MembersCache cache(0);
    bed.refresh(cache);
    CHECK(bed.bytes > kNodes * 150);
    size_t all = 0;
    auto hear = [&](size_t most) {
        bed.refresh(cache);
        CHECK(bed.bytes <= most);
        all += bed.bytes;
        CHECK(cache.current()->epoch == bed.master.membership().epoch());
    };
    bed.master.disconnected(17, bed.links[17]);
    hear(100);
    CHECK(cache.current()->find(NodeId{17})->state == MemberState::kSuspect);
    CHECK(bed.join(17, 2) != kNoNode);
    hear(350);
    CHECK(cache.current()->rows.size() == kNodes);
    bed.master.left(bed.now, 20, bed.links[20]);
    hear(100);
    CHECK(cache.current()->find(NodeId{20}) == nullptr);
    CHECK(all / 4 <= 200);  // suspect, ended, joined, left
    bed.refresh(cache);
    CHECK(bed.bytes == sizeof(FrameHeader) + 17);
    CHECK(same(*cache.current(), bed.master.membership().current(bed.now)));
}

TEST_CASE(
    "member changes: a client of the release before gets all rows, and one takes those of such a master") {
    Bed bed;
    bed.join(1, 1);
    bed.join(2, 1);
    MembersCache cache(0);
    bed.refresh(cache);
    uint64_t known = cache.current()->epoch;
    bed.join(3, 1);
    std::vector<std::byte> question;
    Writer(question).number(known);
    std::vector<std::byte> answer = bed.ask(question);
    Reader r(answer);
    CHECK(r.number<uint64_t>() == known + 1);
    CHECK((r.number<uint8_t>() & ~kMembersFilling) == kMembersChanged);
    CHECK(r.number<uint32_t>() == 3);
    Reader again(answer);
    REQUIRE(cache.read(bed.now, again));
    CHECK(same(*cache.current(), bed.master.membership().current(bed.now)));
}

TEST_CASE("member changes: loads are as fresh as a client's own list may be, however many clients ask") {
    Bed bed;
    NodeId a = bed.join(1, 1);
    MembersCache first(0);
    bed.refresh(first);
    auto beat = [&](uint64_t free_bytes) {
        bed.master.beat(bed.now, a, bed.links[a], load_of(free_bytes), 0, UINT64_MAX);
    };
    beat(300);
    bed.now += 199;
    MembersCache soon(0), later(0);
    bed.refresh(soon);
    CHECK(soon.current()->rows[0].load == load_of(500));
    bed.now += 1;
    bed.refresh(later);
    CHECK(later.current()->rows[0].load == load_of(300));
    CHECK(later.current()->rows[0].silent_ms == 200);
    beat(200);
    bed.join(2, 1);  // another epoch
    MembersCache now(0);
    bed.refresh(now);
    CHECK(now.current()->rows[0].load == load_of(200));
}

// A node's beats, over the protocol.
TEST_CASE("master protocol: a beat that asks for no answer gets one when there is something to drop") {
    Bed bed;
    MasterProtocol node(host_of(bed.master), 77, Caller::kNode, "default");
    auto say = [&](Kind kind, uint16_t flags, auto write) {
        std::vector<std::byte> body, out;
        Writer w(body);
        write(w);
        FrameHeader header;
        header.kind = kind;
        header.flags = flags;
        header.request_id = flags == 0 ? 5 : 0;
        REQUIRE(node.on_frame(bed.now, header, Reader(body), out));
        return out;
    };
    say(Kind::kJoin, 0, [](Writer& w) {
        write_identity(w, identity_of(1, 1));
        write_load(w, load_of(1));
        write_event_endpoints(w, identity_of(1, 1));
        w.number(Version{1});
    });
    Hash128 hash{3, 4};
    say(Kind::kDelta, kFlagOneWay, [&](Writer& w) {
        w.number(uint32_t{kDeltaBegin | kDeltaEnd | kDeltaApplied});
        w.number(uint32_t{1});
        w.number(Version{1});
        write_row(w, DeltaRow{hash, Tier::kDram, true});
    });
    auto beat = [](Writer& w) {
        w.number(uint64_t{0});
        write_load(w, load_of(1));
        w.number(Version{1});
    };
    CHECK(say(Kind::kBeat, kFlagOneWay, beat).empty());
    size_t asked = say(Kind::kBeat, 0, beat).size();
    CHECK(asked > sizeof(FrameHeader));
    NodeId unreached[] = {node.node()};
    bed.master.forget(bed.now, std::string_view(reinterpret_cast<const char*>(&hash), sizeof(hash)),
                      unreached);
    std::vector<std::byte> told = say(Kind::kBeat, kFlagOneWay, beat);
    CHECK(told.size() == asked - 12 + 24);  // without the pace, with a hash and its version
    CHECK(say(Kind::kBeat, 0, beat).size() == asked + 24);
}

TEST_CASE("member changes: nonsense is no answer") {
    Bed bed;
    bed.join(1, 1);
    MembersCache fresh(0), cache(0);
    bed.refresh(cache);
    MembersCache kept = cache;
    auto answer = [](uint8_t flags, auto write) {
        std::vector<std::byte> out;
        Writer w(out);
        w.number(uint64_t{99});
        w.number(flags);
        write(w);
        return out;
    };
    auto reads = [&](MembersCache& by, const std::vector<std::byte>& bytes) {
        Reader r(bytes);
        return by.read(bed.now, r);
    };
    auto empty = answer(kMembersChanged | kMembersSince, [](Writer& w) { MemberChanges{}.write(w); });
    CHECK_FALSE(reads(fresh, empty));  // it knows no epoch
    CHECK(reads(cache, empty));
    CHECK_FALSE(reads(cache, answer(kMembersSince, [](Writer& w) { MemberChanges{}.write(w); })));
    auto stranger = answer(kMembersChanged | kMembersSince, [](Writer& w) {
        MemberChanges{.ended = {}, .turned = {{7, MemberState::kSuspect, 0}}, .moved = {}}.write(w);
    });
    CHECK_FALSE(reads(cache, stranger));
    for (size_t cut = 9; cut < stranger.size(); ++cut) {
        std::vector<std::byte> part(stranger.begin(), stranger.begin() + static_cast<std::ptrdiff_t>(cut));
        CHECK_FALSE(reads(cache, part));
    }
    CHECK_FALSE(reads(cache, answer(kMembersChanged | kMembersSince, [](Writer& w) {
                          w.number(uint16_t{0xFFFF});
                          w.number(uint64_t{0});
                      })));
    CHECK(same(*kept.current(), bed.master.membership().current(bed.now)));
}

}  // namespace
}  // namespace moonpool
