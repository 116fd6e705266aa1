// RelayTable, pure: whose each question is, until when, and how many there may be. The form of questions.
#include <doctest/doctest.h>

#include <functional>
#include <vector>

#include "directory/questions.hpp"
#include "directory/relay_table.hpp"

using namespace moonpool;

namespace {

constexpr RelayLimits kSmall{.client_questions = 2, .client_bytes = 100, .questions = 3, .bytes = 150};

RelayTable::Asked of(RelayTable::ClientId client, uint64_t id) { return {client, id, Kind::kLocate}; }

std::vector<std::byte> body(const std::function<void(Writer&)>& build) {
    std::vector<std::byte> bytes;
    Writer w(bytes);
    build(w);
    return bytes;
}

}  // namespace

TEST_CASE("an answer goes to its client, under the client's number, once") {
    RelayTable table;
    uint64_t first = table.ask(0, of(1, 7), 10, 100), second = table.ask(0, of(2, 7), 10, 100);
    REQUIRE(first != second);
    auto answered = table.answered(second);
    REQUIRE(answered);
    REQUIRE(answered->asked);
    CHECK(answered->asked->client == 2);
    CHECK(answered->asked->request_id == 7);
    CHECK(answered->kind == Kind::kLocate);
    CHECK(!table.answered(second));
    CHECK(!table.answered(99));
    CHECK(table.size() == 1);
    CHECK(table.bytes() == 10);
}

TEST_CASE("a question is late at its own time, and its answer is dropped then") {
    RelayTable table;
    uint64_t number = table.ask(1000, of(1, 5), 10, 100);
    table.ask(1000, of(1, 6), 10, 300);
    CHECK(table.longest_wait_ms() == 300);
    CHECK(table.expire(1099).empty());
    auto late = table.expire(1100);
    REQUIRE(late.size() == 1);
    CHECK(late[0].request_id == 5);
    CHECK(table.expire(1100).empty());
    CHECK(table.oldest_ms() == 1000);  // the master still owes it
    auto answered = table.answered(number);
    REQUIRE(answered);
    CHECK(!answered->asked);
}

TEST_CASE("one client, and all together, have so many questions and bytes under way") {
    RelayTable table(kSmall);
    CHECK(!table.refusal(1, 100));
    CHECK(table.refusal(1, 101));
    table.ask(0, of(1, 1), 40, 100);
    CHECK(table.refusal(1, 61));
    uint64_t second = table.ask(0, of(1, 2), 40, 50);
    REQUIRE(table.refusal(1, 1));
    CHECK(table.refusal(1, 1)->code == Code::kTooLarge);
    CHECK(!table.refusal(2, 70));
    CHECK(table.refusal(2, 71));  // of all together
    table.ask(0, of(2, 1), 1, 100);
    CHECK(table.refusal(3, 1));
    // What is late takes no place from its client, and still one of all.
    CHECK(table.expire(50).size() == 1);
    CHECK(table.refusal(3, 1));
    CHECK(table.answered(second));
    CHECK(!table.refusal(1, 1));
    CHECK(!table.refusal(3, 1));
}

TEST_CASE("a client that ends is answered no more, and leaves its numbers to no other") {
    RelayTable table(kSmall);
    uint64_t number = table.ask(0, of(1, 1), 10, 100);
    table.end(1);
    CHECK(table.longest_wait_ms() == 0);
    CHECK(table.expire(1000).empty());
    uint64_t next = table.ask(0, of(2, 1), 10, 100);
    CHECK(next != number);
    auto answered = table.answered(number);
    REQUIRE(answered);
    CHECK(!answered->asked);
    table.clear();
    CHECK(!table.oldest_ms());
    CHECK(table.bytes() == 0);
    CHECK(!table.answered(next));
    CHECK(table.ask(0, of(2, 1), 10, 100) > next);
}

TEST_CASE("a question is passed on in the form that a master answers, and in no other") {
    Hash128 hash{1, 2};
    auto locate = [&](uint32_t claimed, size_t hashes) {
        return body([&](Writer& w) {
            LocateHead{.n = claimed}.write(w);
            for (size_t i = 0; i < hashes; ++i) write_hash(w, hash);
        });
    };
    auto fits = [](Kind kind, const std::vector<std::byte>& bytes) {
        return fits_question(kind, Reader(bytes));
    };
    CHECK(fits(Kind::kLocate, locate(2, 2)));
    CHECK(!fits(Kind::kLocate, locate(3, 2)));
    CHECK(!fits(Kind::kLocate, locate(1, 2)));
    CHECK(!fits(Kind::kLocate, locate(0xFFFFFFFF, 2)));
    CHECK(!fits(Kind::kLocate, locate(kQuestionKeysMax + 1, kQuestionKeysMax + 1)));
    CHECK(!fits(Kind::kLocate, {}));

    CHECK(fits(Kind::kMembers, body([](Writer& w) { w.number(uint64_t{5}); })));
    CHECK(!fits(Kind::kMembers, body([](Writer& w) { w.number(uint32_t{5}); })));

    auto place = [](uint16_t nodes, uint16_t hosts, const std::function<void(Writer&)>& rest) {
        return body([&](Writer& w) {
            w.number(uint64_t{4096});
            w.number(uint16_t{1});
            w.number(uint16_t{0});
            w.number(nodes);
            w.number(hosts);
            rest(w);
        });
    };
    CHECK(fits(Kind::kPlace, place(1, 1, [](Writer& w) {
                   w.number(NodeId{3});
                   w.text16("host");
               })));
    CHECK(!fits(Kind::kPlace, place(2, 0, [](Writer& w) { w.number(NodeId{3}); })));
    CHECK(!fits(Kind::kPlace, place(0, 2, [](Writer& w) { w.text16("host"); })));
    CHECK(!fits(Kind::kPlace, place(0, 1, [](Writer& w) { w.text16("\xff"); })));

    auto forget = [&](uint32_t n, uint16_t nodes) {
        return body([&](Writer& w) {
            w.number(n);
            w.number(nodes);
            w.number(uint16_t{0});
            w.number(NodeId{1});
            write_hash(w, hash);
        });
    };
    CHECK(fits(Kind::kForget, forget(1, 1)));
    CHECK(!fits(Kind::kForget, forget(2, 1)));
    CHECK(!fits(Kind::kForget, forget(1, 0)));

    OrderDone done{{hash}, {Version{9}}, 4, {{1, 2}}, {{2}}};
    std::vector<std::byte> ordered = body([&](Writer& w) { OrderedFrame(done, 0, 1).write(w); });
    CHECK(fits(Kind::kOrdered, ordered));
    ordered.pop_back();
    CHECK(!fits(Kind::kOrdered, ordered));

    // What is a node's or a standby's to say is no question.
    for (Kind kind : {Kind::kJoin, Kind::kBeat, Kind::kDelta, Kind::kLeave, Kind::kRemovals, Kind::kMirror}) {
        CHECK(!fits(kind, locate(1, 1)));
    }
}
