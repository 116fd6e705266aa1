// The checker of histories, on histories written by hand.
#include <doctest/doctest.h>

#include "history.hpp"

using namespace moonpool::sim;

namespace {

constexpr auto kDone = Operation::kDone;

Operation op(Operation::Kind kind, uint64_t value, Micros begin, Micros end,
             Operation::Outcome outcome = kDone) {
    return {.kind = kind, .outcome = outcome, .value = value, .begin = begin, .end = end};
}

Operation read(uint64_t value, Micros begin, Micros lasts = 5) {
    return op(Operation::kGet, value, begin, begin + lasts);
}

}  // namespace

TEST_CASE("sim history: a value that was removed or replaced is not read again") {
    Operation one = op(Operation::kReplace, 1, 0, 10), two = op(Operation::kReplace, 2, 20, 30);
    Operation removal = op(Operation::kRemove, 3, 20, 30);
    CHECK_FALSE(check({one, two, read(2, 40)}, 1000));
    CHECK_FALSE(check({one, two, read(1, 25)}, 1000));  // concurrent with the replacement
    CHECK_FALSE(check({one, two, read(0, 40)}, 1000));  // a miss is always allowed
    CHECK_FALSE(check({one, removal, read(1, 28)}, 1000));
    auto old = check({one, two, read(1, 40)}, 1000);
    REQUIRE(old);
    CHECK(old->kind == Finding::kOldValue);
    CHECK_FALSE(old->for_ever);
    auto removed = check({one, removal, read(1, 40)}, 35);
    REQUIRE(removed);
    CHECK(removed->kind == Finding::kRemovedValue);
    CHECK(removed->for_ever);
    // What was not acknowledged may or may not have been carried out.
    removal.outcome = Operation::kUnknown;
    CHECK_FALSE(check({one, removal, read(1, 40)}, 1000));
}

TEST_CASE("sim history: two writes at the same moment have one order, the same for all readers") {
    Operation one = op(Operation::kReplace, 1, 0, 10), two = op(Operation::kReplace, 2, 5, 12);
    CHECK_FALSE(check({one, two, read(1, 20), read(1, 30)}, 1000));
    CHECK_FALSE(check({one, two, read(2, 20), read(2, 30)}, 1000));
    CHECK_FALSE(check({one, two, read(1, 11), read(2, 30)}, 1000));  // the first while the other is written
    CHECK(check({one, two, read(1, 20), read(2, 30)}, 1000));
}

TEST_CASE("sim history: while a replacement is under way either value may be read") {
    Operation one = op(Operation::kReplace, 1, 0, 10), two = op(Operation::kReplace, 2, 20, 60);
    CHECK_FALSE(check({one, two, read(2, 30), read(1, 40), read(2, 50)}, 1000));
    CHECK_FALSE(check({one, two, read(2, 30), read(1, 59)}, 1000));
    CHECK(check({one, two, read(2, 30), read(1, 61)}, 1000));
    two.outcome = Operation::kUnknown;  // it may take effect at any time, and then holds
    CHECK_FALSE(check({one, two, read(2, 30), read(1, 61)}, 1000));
}

TEST_CASE("sim history: reads of a value within its own write do not order it") {
    // The later one ends first, and the client that writes the earlier one reads its own.
    Operation early = op(Operation::kReplace, 1, 0, 50), late = op(Operation::kReplace, 2, 10, 12);
    CHECK_FALSE(check({early, late, read(1, 45, 1), read(2, 60, 1), read(2, 70, 1)}, 1000));
    CHECK(check({early, late, read(1, 51, 1), read(2, 60, 1)}, 1000));
    CHECK(check({early, late, read(2, 51, 1), read(1, 60, 1)}, 1000));
}

TEST_CASE("sim history: a put that waited is read on its host until its node has joined again") {
    Operation put = op(Operation::kPut, 1, 0, 200 * kMs);
    auto removal = [](Micros begin, Micros lasts = 10 * kMs) {
        return op(Operation::kRemove, 2, begin, begin + lasts);
    };
    Operation elsewhere = read(1, 600 * kMs, kMs);
    elsewhere.from = 1;
    CHECK_FALSE(check({put, removal(400 * kMs), read(1, 700 * kMs, kMs)}, 10 * kSecond));
    CHECK(check({put, removal(400 * kMs), read(1, 701 * kMs, kMs)}, 10 * kSecond));
    CHECK(check({put, removal(400 * kMs), elsewhere}, 10 * kSecond));
    CHECK_FALSE(check({put, removal(400 * kMs, kSecond), read(1, 1600 * kMs, kMs)}, 10 * kSecond));
    CHECK(check({put, removal(400 * kMs, kSecond), read(1, 1701 * kMs, kMs)}, 10 * kSecond));
    // Another host that has read what a node told of within the removal.
    elsewhere.begin = 1600 * kMs;
    CHECK_FALSE(check({put, removal(400 * kMs, kSecond), elsewhere}, 10 * kSecond));
    elsewhere.begin = 1701 * kMs;
    elsewhere.end = elsewhere.begin + kMs;
    CHECK(check({put, removal(400 * kMs, kSecond), elsewhere}, 10 * kSecond));
    put.begin = 150 * kMs;  // it did not wait
    CHECK(check({put, removal(400 * kMs), read(1, 600 * kMs, kMs)}, 10 * kSecond));
    CHECK_FALSE(check({put, removal(400 * kMs, kSecond), read(1, 1700 * kMs, kMs)}, 10 * kSecond));
    CHECK(check({put, removal(400 * kMs, kSecond), read(1, 1701 * kMs, kMs)}, 10 * kSecond));
}

TEST_CASE(
    "sim history: a write that all have forgotten counts until then, and what it wrote stays replaced") {
    Operation one = op(Operation::kReplace, 1, 0, 10), two = op(Operation::kReplace, 2, 20, 30);
    two.forgotten_at = 100;
    CHECK(check({one, two, read(1, 40)}, 1000));
    CHECK_FALSE(check({one, two, read(1, 100)}, 1000));
    CHECK(check({one, two, op(Operation::kRemove, 3, 120, 130), read(2, 140)}, 1000));
}

TEST_CASE("sim history: puts without replace need no order, removals of them do") {
    Operation one = op(Operation::kPut, 1, 0, 10), two = op(Operation::kPut, 2, 20, 30);
    Operation removal = op(Operation::kRemove, 3, 40, 50);
    CHECK_FALSE(check({one, two, read(1, 35)}, 1000));
    CHECK(check({one, two, removal, read(2, 60)}, 1000));
    CHECK_FALSE(check({one, removal, op(Operation::kPut, 4, 45, 55), read(4, 60)}, 1000));
    CHECK(check({one, read(9, 20)}, 1000));  // never written
}

TEST_CASE("sim history: of unique puts one is stored, until the key is removed, where nothing is lost") {
    Operation one = op(Operation::kUnique, 1, 0, 10), two = op(Operation::kUnique, 2, 20, 30);
    Operation removal = op(Operation::kRemove, 3, 12, 18), refused = two;
    CHECK_FALSE(check({one, two}, 1000));  // the first may be lost
    CHECK(check({one, two}, 1000, true));
    CHECK_FALSE(check({one, removal, two}, 1000, true));
    CHECK(check({one, two, read(1, 40)}, 1000));  // as with a replacement
    refused.outcome = Operation::kNothing;
    CHECK_FALSE(check({one, refused}, 1000, true));
    CHECK(check({one, removal, refused}, 1000, true));
}

TEST_CASE(
    "sim history: what a node told of while a replacement waited is read until the beat after its end") {
    Operation one = op(Operation::kReplace, 1, 0, 200 * kMs);
    Operation two = op(Operation::kReplace, 2, 300 * kMs, 800 * kMs);
    CHECK_FALSE(check({one, two, read(1, 1000 * kMs, kMs)}, 10 * kSecond));
    CHECK(check({one, two, read(1, 1101 * kMs, kMs)}, 10 * kSecond));
    two.end = 400 * kMs;  // it did not wait
    CHECK(check({one, two, read(1, 600 * kMs, kMs)}, 10 * kSecond));
}
