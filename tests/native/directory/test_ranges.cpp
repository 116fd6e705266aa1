// Ranges of shards, and one list of members from those of several masters.
#include <doctest/doctest.h>

#include <set>

#include "directory/master.hpp"
#include "directory/member_views.hpp"
#include "directory/protocol.hpp"
#include "directory/ranges.hpp"

using namespace moonpool;

namespace {

std::shared_ptr<Members> list_of(uint64_t reading,
                                 std::initializer_list<std::tuple<NodeId, uint8_t, MemberState>> rows) {
    auto list = std::make_shared<Members>();
    list->reading = reading;
    for (auto [id, life, state] : rows) {
        Member member;
        member.id = id;
        member.state = state;
        member.identity.name = "n" + std::to_string(life);
        member.identity.incarnation.fill(life);
        list->rows.push_back(member);
    }
    return list;
}

Incarnation life(uint8_t number) {
    Incarnation life;
    life.fill(number);
    return life;
}

constexpr auto kAlive = MemberState::kAlive, kJoining = MemberState::kJoining,
               kSuspect = MemberState::kSuspect, kGone = MemberState::kGone;
const Hash128 kOfFirst{.low = 0, .high = 1}, kOfSecond{.low = 1023, .high = 1};

}  // namespace

TEST_CASE("ranges: every shard is of one range, and all are of about the same size") {
    for (uint32_t count = 1; count <= kRangesMax; ++count) {
        std::vector<uint32_t> shards(count);
        uint32_t last = 0;
        for (uint64_t shard = 0; shard < kShards; ++shard) {
            uint32_t range = range_of(Hash128{.low = shard + kShards * 7, .high = 0}, count);
            REQUIRE(range < count);
            REQUIRE(range >= last);
            last = range;
            ++shards[range];
            for (uint32_t index = 0; index < count; ++index)
                REQUIRE(Range{index, count}.contains({.low = shard, .high = 0}) == (index == range));
        }
        auto [least, most] = std::ranges::minmax(shards);
        CHECK(most - least <= 1);
    }
}

TEST_CASE("ranges: texts") {
    CHECK(Range::parse("0/1") == Range{0, 1});
    CHECK(Range::parse("3/4") == Range{3, 4});
    CHECK(Range::parse("15/16")->text() == "15/16");
    for (const char* wrong : {"", "4/4", "0/0", "0/17", "1", "/4", "a/4", "1/4 ", "-1/4", "1/4/5"})
        CHECK_MESSAGE(!Range::parse(wrong), wrong);
    CHECK(split_ranges("a,b;c,d") == std::vector<std::string>{"a,b", "c,d"});
    CHECK(split_ranges("a,b") == std::vector<std::string>{"a,b"});
    CHECK(split_ranges("").empty());
}

TEST_CASE("ranges: versions of one range say nothing of another") {
    RangeVersions known(2);
    CHECK(known.is_none());
    known.raise(kOfSecond, 7);
    known.raise(1, 5);
    CHECK(known.of(kOfFirst) == kNoVersion);
    CHECK(known.of(kOfSecond) == 7);
    RangeVersions other(2);
    other.raise(0, 3);
    known.raise(other);
    CHECK(known.at(0) == 3);
    known.raise(RangeVersions::of_one(100));
    CHECK(known.at(0) == 3);
    RangeVersions none;
    none.raise(known);
    CHECK(none == known);
    CHECK(RangeVersions::of_one(9).of(kOfSecond) == 9);
}

TEST_CASE("ranges: what is known of one range is filled in, and stands for no other") {
    RangeVersions heard(4), none, of_one = RangeVersions::of_one(9);
    heard.raise(1, 20);
    none.raise(heard);  // as a process that knows nothing does
    CHECK(none.count() == 4);
    none.raise(of_one);  // says nothing of four
    CHECK(none.at(0) == kNoVersion);
    RangeVersions empty(4);
    empty.raise(of_one);
    CHECK(empty.count() == 4);
    CHECK(empty.is_none());
    RangeVersions newer(4);
    newer.raise(1, 30);
    newer.raise(2, 40);
    none.fill(newer);
    CHECK(none.at(1) == 20);  // of when the call began
    CHECK(none.at(2) == 40);
    none.fill(of_one);
    CHECK(none.at(0) == kNoVersion);
}

TEST_CASE("ranges: a master takes no rows and no removals of others") {
    Master master({}, 0, first_version(1), Range{1, 2});
    NodeIdentity who;
    who.name = "a";
    auto joined = master.join(0, who, {}, 1, kNoVersion);
    REQUIRE(joined);
    std::vector<std::byte> rows;
    Writer w(rows);
    for (const Hash128& hash : {kOfFirst, kOfSecond}) write_row(w, {hash, Tier::kDram, true});
    REQUIRE(master.delta(0, joined->id, 1, kDeltaBegin | kDeltaEnd, kNoVersion,
                         {reinterpret_cast<const char*>(rows.data()), rows.size()}));
    CHECK(master.directory().rows(joined->id, Tier::kDram) == 1);
    std::vector<Drop> removals{{kOfFirst, 5}, {kOfSecond, 6}};
    master.removals(0, joined->id, 1, kNoVersion, removals);
    CHECK(master.removals() == 1);
}

TEST_CASE("member views: a life has one number, whatever its masters call it") {
    MemberViews views(2);
    CHECK(views.all() == nullptr);
    views.hear(0, list_of(1, {{4, 1, kAlive}, {7, 2, kAlive}}), true);
    views.hear(1, list_of(1, {{4, 2, kJoining}, {9, 3, kSuspect}}), true);
    std::set<NodeId> numbers;
    for (uint8_t n : {1, 2, 3}) numbers.insert(*views.number(life(n)));
    CHECK(numbers.size() == 3);
    NodeId second = *views.number(life(2));
    CHECK(views.number_at(0, second) == 7);
    CHECK(views.number_at(1, second) == 4);
    CHECK(views.number_at(1, *views.number(life(1))) == std::nullopt);
    std::shared_ptr<const Members> all = views.all();
    REQUIRE(all->rows.size() == 3);
    const Member* member = all->find(second);
    CHECK(member == all->find(life(2)));
    CHECK(member->state == kAlive);
    CHECK(all->state(*member, kOfFirst) == kAlive);
    CHECK(all->state(*member, kOfSecond) == kJoining);
    CHECK(all->state(*all->find(life(1)), kOfSecond) == kGone);
    CHECK(all->find(life(3))->state == kSuspect);
    CHECK(!all->is_alive(*member));
    std::shared_ptr<const Members> of_second = views.of(1);
    CHECK(of_second->rows.size() == 2);
    CHECK(of_second->find(second)->state == kJoining);
    CHECK(views.check_integrity());
}

TEST_CASE("member views: an older reading changes nothing, and numbers are not given again soon") {
    MemberViews views(2);
    views.hear(0, list_of(2, {{1, 1, kAlive}}), true);
    NodeId first = *views.number(life(1));
    views.hear(0, list_of(1, {{1, 9, kAlive}}), true);
    CHECK(views.number(life(9)) == std::nullopt);
    views.hear(0, list_of(3, {{1, 2, kAlive}}), true);
    CHECK(views.number(life(1)) == std::nullopt);
    CHECK(*views.number(life(2)) != first);
    views.hear(0, list_of(4, {{1, 1, kAlive}}), true);
    CHECK(*views.number(life(1)) != first);
    for (uint64_t i = 0; i < 70000; ++i) {
        auto list = list_of(5 + i, {{1, 1, kAlive}});
        for (int k = 0; k < 8; ++k)
            list->rows[0].identity.incarnation[8 + k] = static_cast<uint8_t>(i >> 8 * k);
        views.hear(0, list, true);
        REQUIRE(views.all()->rows[0].id != kNoNode);
    }
    CHECK(views.check_integrity());
}

TEST_CASE(
    "member views: a master that is away says nothing of which nodes live, and of its keys what it said "
    "last") {
    MemberViews views(2);
    views.hear(0, list_of(1, {{1, 1, kSuspect}}), true);
    views.hear(1, list_of(1, {{1, 1, kAlive}}), false);
    std::shared_ptr<const Members> all = views.all();
    CHECK(all->rows[0].state == kSuspect);
    CHECK(all->state(all->rows[0], kOfSecond) == kAlive);
    views.hear(0, nullptr, false);
    CHECK(views.all()->rows[0].state == kAlive);
}

TEST_CASE("member views: a list says of which ranges it is an old word, or none") {
    MemberViews views(3);
    views.hear(0, list_of(1, {{5, 1, kAlive}}), true);
    views.hear(1, list_of(1, {{9, 1, kAlive}}), true);
    CHECK(views.all()->away == 0b100);
    views.hear(2, list_of(1, {{7, 1, kSuspect}}), true);
    CHECK(views.all()->away == 0);
    CHECK(!views.all()->is_alive(views.all()->rows[0]));  // not for each master
    views.hear(1, nullptr, false);
    CHECK(views.all()->away == 0b010);
}

TEST_CASE("member views: a range whose master is new fills, and no other") {
    MemberViews views(2);
    views.hear(0, list_of(1, {{1, 1, kAlive}}), true);
    auto filling = list_of(1, {});
    filling->before = list_of(0, {{kNoNode, 1, kAlive}, {kNoNode, 2, kAlive}});
    views.hear(1, filling, true);
    std::shared_ptr<const Members> all = views.all();
    CHECK(!all->is_filling(kOfFirst));
    CHECK(all->is_filling(kOfSecond));
    REQUIRE(all->rows.size() == 1);
    CHECK(all->state(all->rows[0], kOfSecond) == kAlive);  // it has not joined that master again yet
    REQUIRE(all->find(life(2)) != nullptr);
    CHECK(all->find(life(2))->id == kNoNode);
}

TEST_CASE("member views: of a range whose former master was never heard, the others' nodes may be there") {
    MemberViews views(2);
    views.hear(0, list_of(1, {{1, 1, kAlive}, {2, 2, kAlive}}), true);
    auto filling = list_of(1, {{5, 1, kAlive}});
    views.hear(1, filling, true);
    std::shared_ptr<const Members> of_second = views.of(1);
    REQUIRE(of_second->before != nullptr);
    REQUIRE(of_second->before->rows.size() == 1);
    CHECK(of_second->before->rows[0].identity.incarnation == life(2));
    CHECK(of_second->before->rows[0].id == kNoNode);
    views.hear(1, list_of(2, {{5, 1, kAlive}, {6, 2, kAlive}}), true);
    views.hear(1, list_of(3, {{5, 1, kAlive}}), true);
    CHECK(views.of(1)->before->rows.empty());  // it has left
}
