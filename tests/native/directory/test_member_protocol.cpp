#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "directory/member_protocol.hpp"
#include "directory/pace.hpp"

namespace moonpool {
namespace {

// A node's side of a connection, its clock, and what it has sent.
struct Bed {
    explicit Bed(MemberProtocolOptions options = {.identity = {}, .timeout_ms = 700})
        : log(1000, [] {}),
          protocol(std::move(options),
                   MemberHooks{[this](uint64_t& cursor, std::vector<DeltaRow>&) {
                                   cursor = pieces == 0 ? 0 : pieces--;
                                   return true;
                               },
                               [](NodeLoad&) { return true; },
                               [this](const Drops& drops) {
                                   applied = std::max(applied, drops.upto);
                                   return true;
                               },
                               [this] { return applied; }, [this] { return confirmed; },
                               [this](Version version) {
                                   confirmed = std::max(confirmed, version);
                                   return true;
                               },
                               [this] { return is_empty; },
                               [](Version, Version&, std::vector<Drop>&) { return kNoVersion; }},
                   log, counters, [this] { return now; }) {
        connect();
    }
    void connect() {
        REQUIRE(protocol.connected("master", [this](std::span<const std::byte> frame) {
            FrameHeader header;
            std::memcpy(&header, frame.data(), sizeof(header));
            sent.push_back(header);
            last.assign(frame.begin(), frame.end());
            return success();
        }));
    }
    // As its JOIN says, which ends with it.
    Version joined_with() {
        protocol.disconnected();
        connect();
        REQUIRE(sent.back().kind == Kind::kJoin);
        Version version = 0;
        std::memcpy(&version, last.data() + last.size() - sizeof(version), sizeof(version));
        return version;
    }
    void put(uint64_t ms) {
        log.push(Hash128{now, now}, Tier::kDram, true);
        now += ms;
        REQUIRE(protocol.step());
    }

    // pace: what stands behind the answer. request: that it answers; 0: none.
    void answer(Kind kind, const std::vector<uint32_t>& pace, std::optional<uint64_t> request = {}) {
        std::vector<std::byte> body;
        Writer w(body);
        if (kind == Kind::kJoin) {
            w.number(uint16_t{0});
            w.number(uint16_t{0});
            w.number(uint32_t{200});
            w.number(uint32_t{16384});
        }
        w.number(uint64_t{1});
        DropList drops(10);
        write_drops(w, drops, 10);
        write_versions(w, drops, 10, upto);
        if (kind == Kind::kJoin) w.number(kNoVersion);
        for (uint32_t ms : pace) w.number(ms);
        FrameHeader header;
        header.kind = kind;
        header.request_id = request.value_or(sent.empty() ? 1 : sent.back().request_id);
        REQUIRE(protocol.on_frame(header, Reader(body)));
    }
    // Up to where the first frame of the inventory that is due says that its rows are checked.
    Version inventory_with() {
        for (uint64_t end = now + 100; now < end; ++now) {
            sent.clear();
            REQUIRE(protocol.step());
            auto delta = std::ranges::find(sent, Kind::kDelta, &FrameHeader::kind);
            if (delta == sent.end()) continue;
            REQUIRE(sent.back().kind == Kind::kDelta);
            Reader body{std::span<const std::byte>(last).subspan(sizeof(FrameHeader))};
            REQUIRE((body.number<uint32_t>() & kDeltaBegin) != 0);
            body.number<uint32_t>();
            return body.number<Version>();
        }
        FAIL("no inventory");
        return kNoVersion;
    }
    // Answers what it asks; nothing is put meanwhile.
    void beats(uint64_t ms) {
        for (uint64_t end = now + ms; now < end; ++now) {
            sent.clear();
            REQUIRE(protocol.step());
            const std::vector<FrameHeader> frames = sent;
            for (const FrameHeader& frame : frames) {
                if (frame.kind != Kind::kBeat) continue;
                sent = {frame};
                answer(Kind::kBeat, {20, 200, 1});
            }
        }
    }
    // Answers what it asks; how many frames of that kind it sends within that time.
    size_t frames(Kind kind, uint64_t ms, const std::vector<uint32_t>& pace) {
        size_t n = 0;
        for (uint64_t end = now + ms; now < end; ++now) {
            log.push(Hash128{now, now}, Tier::kDram, true);
            sent.clear();
            REQUIRE(protocol.step());
            for (const FrameHeader& header : std::vector<FrameHeader>(sent)) {
                n += header.kind == kind;
                asked += header.kind == Kind::kBeat && (header.flags & kFlagOneWay) == 0;
                if (header.kind != Kind::kBeat || (header.flags & kFlagOneWay) != 0) continue;
                sent = {header};
                answer(Kind::kBeat, pace);
            }
        }
        return n;
    }
    void join(const std::vector<uint32_t>& pace) {
        answer(Kind::kJoin, pace);
        frames(Kind::kBeat, 20, {});
    }

    uint64_t now = 1000000;
    size_t asked = 0;           // beats that are to be answered
    Version upto = kNoVersion;  // as answers have it
    Version applied = kNoVersion, confirmed = kNoVersion;
    bool is_empty = true;
    uint64_t pieces = 0;          // of the inventory, before the last
    std::vector<std::byte> last;  // of the frames that it has sent
    std::vector<FrameHeader> sent;
    DeltaLog log;
    MemberCounters counters;
    MemberProtocol protocol;
};

TEST_CASE(
    "member protocol: a node gathers changes, and waits between beats, for as long as its master says") {
    Bed bed;
    bed.join({20, 250, 1});
    CHECK(bed.frames(Kind::kDelta, 1000, {}) == 50);
    CHECK(bed.frames(Kind::kBeat, 1000, {}) == 4);
    bed.frames(Kind::kDelta, 500, {100, 500, 1});
    CHECK(bed.frames(Kind::kDelta, 1000, {100, 500, 1}) == 10);
    CHECK(bed.frames(Kind::kBeat, 1000, {100, 500, 1}) == 2);
    bed.frames(Kind::kDelta, 1000, {0, 200, 1});
    CHECK(bed.frames(Kind::kDelta, 1000, {0, 200, 1}) == 200);  // its own 5 ms
}

TEST_CASE(
    "member protocol: a master of the release before says nothing of the pace, one that is wrong too much") {
    Bed old;
    old.join({});
    CHECK(old.frames(Kind::kDelta, 1000, {}) == 200);
    CHECK(old.frames(Kind::kBeat, 1000, {}) == 5);
    Bed wrong;
    wrong.join({UINT32_MAX, 0, 0});
    CHECK(wrong.frames(Kind::kDelta, 10000, {UINT32_MAX, 50, UINT32_MAX}) == 10);  // at most 1 s
}

TEST_CASE(
    "member protocol: where the master says so, a beat in some is to be answered, and one that it waits "
    "for") {
    Bed bed;
    bed.join({5, 100, 4});
    bed.frames(Kind::kBeat, 1000, {});
    bed.asked = 0;
    CHECK(bed.frames(Kind::kBeat, 4000, {5, 100, 4}) == 40);
    CHECK(bed.asked == 10);
    // Something to drop, that was not asked for: that it is done is told at once, and an answer is wanted.
    DropList drops(10);
    drops.push({Hash128{1, 1}, 7});
    std::vector<std::byte> body;
    Writer w(body);
    w.number(uint64_t{1});
    write_drops(w, drops, 10);
    write_versions(w, drops, 10, 7);
    FrameHeader header;
    header.kind = Kind::kBeat;
    REQUIRE(bed.protocol.on_frame(header, Reader(body)));
    bed.asked = 0;
    CHECK(bed.frames(Kind::kBeat, 2, {5, 100, 4}) == 1);
    CHECK(bed.asked == 1);
}

TEST_CASE("member protocol: a node is right up to where it was with rows that no answer has confirmed") {
    Bed bed;
    bed.is_empty = false;
    bed.upto = 5;
    bed.join({20, 200, 1});
    bed.put(30);
    bed.beats(500);
    CHECK(bed.confirmed == 5);
    SUBCASE("a row that waits to be sent") { bed.log.push(Hash128{1, 1}, Tier::kDram, true); }
    SUBCASE("a row that is sent") { bed.put(30); }
    SUBCASE("rows that are lost, until the inventory has them") {
        for (uint64_t i = 0; i < 1001; ++i) bed.log.push(Hash128{i, i}, Tier::kDram, true);
        bed.put(30);
    }
    bed.upto = 9;
    bed.answer(Kind::kBeat, {}, 0);  // of which the master did not think that the node has that key
    CHECK(bed.applied == 9);
    CHECK(bed.confirmed == 5);
    CHECK(bed.joined_with() == 5);
    bed.answer(Kind::kJoin, {20, 200, 1});
    CHECK(bed.confirmed == 9);
    bed.upto = 12;
    bed.log.push(Hash128{2, 2}, Tier::kDram, true);
    bed.beats(500);
    CHECK(bed.confirmed == 12);
    CHECK(bed.joined_with() == 12);
}

TEST_CASE("member protocol: rows are checked up to where the node was when it put their objects") {
    Bed bed;
    bed.upto = 5;
    bed.join({20, 200, 1});
    bed.beats(500);
    SUBCASE("rows that are lost are told by an inventory") {
        bed.put(30);
        for (uint64_t i = 0; i < 1001; ++i) bed.log.push(Hash128{i, i}, Tier::kDram, true);
        bed.upto = 9;
        bed.answer(Kind::kBeat, {}, 0);
        CHECK(bed.applied == 9);
        bed.pieces = 50;
        CHECK(bed.inventory_with() == 5);
        bed.put(30);  // and once more, within that inventory
        for (uint64_t i = 0; i < 1001; ++i) bed.log.push(Hash128{i, i}, Tier::kDram, true);
        CHECK(bed.inventory_with() == 5);
    }
    SUBCASE("what an empty node puts while it joins") {
        CHECK(bed.joined_with() == UINT64_MAX);
        bed.upto = 9;
        bed.answer(Kind::kJoin, {20, 200, 1});
        CHECK(bed.inventory_with() == 5);
        CHECK(bed.confirmed == 5);
    }
    SUBCASE("what a node held when it joined is right with the answer") {
        bed.is_empty = false;
        CHECK(bed.joined_with() == 5);
        bed.upto = 9;
        bed.answer(Kind::kJoin, {20, 200, 1});
        CHECK(bed.inventory_with() == 9);
    }
}

TEST_CASE("member protocol: beats before which all was told are counted, also while changes come") {
    Bed bed;
    bed.upto = 5;
    bed.join({20, 200, 1});
    uint64_t before = bed.counters.settled_total;
    bed.frames(Kind::kBeat, 1000, {});  // a change each ms: some are always waiting
    CHECK(bed.counters.settled_total == before);
    bed.protocol.settle_soon();
    bed.frames(Kind::kBeat, 1000, {});
    CHECK(bed.counters.settled_total == before + 4);
    bed.upto = kNoVersion;  // there is more to drop than the answer has
    bed.protocol.settle_soon();
    bed.frames(Kind::kBeat, 1000, {});
    CHECK(bed.counters.settled_total == before + 4);
    bed.upto = 5;
    bed.protocol.settle_soon();
    for (uint64_t i = 0; i < 1001; ++i) bed.log.push(Hash128{i, i}, Tier::kDram, true);  // it overflows
    bed.sent.clear();
    bed.now += 200;
    REQUIRE(bed.protocol.step());
    bed.answer(Kind::kBeat, {});
    CHECK(bed.counters.settled_total == before + 4);
}

TEST_CASE("member protocol: it gives a master up that does not answer within its time") {
    Bed bed;
    bed.now += 700;
    CHECK(bed.protocol.step());
    CHECK(bed.protocol.due_ms() == bed.now + 1);
    bed.now += 1;
    CHECK(bed.protocol.step().error().code == Code::kTimeout);
}

TEST_CASE(
    "pace: as many frames as a master takes, however many nodes change, and fast again when they rest") {
    Pace pace({});
    uint64_t now = 500000;
    // Nodes that send a frame each batch_ms.
    auto frames_a_second = [&](uint64_t nodes) {
        uint64_t frames = nodes * 1000 / pace.batch_ms();
        for (uint64_t i = 0; i < 2 * frames; ++i) pace.delta();
        pace.tick(now += 2000);
        return frames;
    };
    pace.tick(now);
    CHECK(pace.batch_ms() == 5);
    for (int i = 0; i < 5; ++i) frames_a_second(90);
    CHECK(pace.batch_ms() == 5);
    CHECK(frames_a_second(10000) == 2000000);
    for (int i = 0; i < 5; ++i) CHECK(frames_a_second(10000) <= 20000);
    CHECK(pace.batch_ms() == 500);
    CHECK(frames_a_second(60000) > 20000);
    frames_a_second(60000);
    CHECK(pace.batch_ms() == 1000);  // and no longer
    for (int i = 0; i < 10; ++i) frames_a_second(10);
    CHECK(pace.batch_ms() == 5);
}

TEST_CASE("pace: beats of as many nodes as a master takes, and never so few that a node seems silent") {
    Pace pace({});
    CHECK(pace.beat_ms(100, 200, 1000) == 200);
    CHECK(pace.beat_ms(9000, 200, 1000) == 300);
    CHECK(pace.beat_ms(60000, 200, 1000) == 333);
    CHECK(pace.beat_ms(60000, 200, 5000) == 1666);
    CHECK(pace.beat_ms(60000, 200, 300) == 200);
    CHECK(pace.beats_per_answer(100, 200) == 1);
    CHECK(pace.beats_per_answer(10000, 333) == 4);
    CHECK(pace.beats_per_answer(65000, 333) == 5);
}

}  // namespace
}  // namespace moonpool
