// KNOWN FAULTS of today's protocol: each case says under which conditions a finding is expected. A protocol
// without the fault makes the case fail: then the case is turned around (no finding in so many seeds) and
// goes to test_clean.cpp.
#include <doctest/doctest.h>

#include "cluster.hpp"

using namespace moonpool::sim;

namespace {

void expect_one(uint64_t seeds, const Conditions& conditions, const Counts& counts) {
    Search found = search(1, seeds, conditions, {}, counts);
    REQUIRE_MESSAGE(found.seed, "the known fault is gone: turn this case around");
    MESSAGE(explain(*found.seed, found.plan, found.report));
}

bool is_removed_for_ever(const Finding& f) { return f.kind == Finding::kRemovedValue && f.for_ever; }
bool is_removed_for_a_while(const Finding& f) { return f.kind == Finding::kRemovedValue && !f.for_ever; }

Conditions puts_and_removals() {
    Conditions c;
    c.replaces = 0;
    c.apart = 300 * kMs;
    return c;
}

}  // namespace

// FORGET names the nodes that were not reached by the numbers of their lives at the LOCATE. A holder that is
// back with its disk under another number meanwhile counts as told; another holder that stands still keeps
// the removal open for that long.
TEST_CASE("sim, known fault: a holder that restarts within a removal serves the removed key for ever") {
    Conditions c = puts_and_removals();
    c.restarts = 3;
    c.stops = 2;
    c.disks = true;
    expect_one(40, c, is_removed_for_ever);
}

// A replacement removes the key elsewhere and then puts it at home; nothing orders two of them.
TEST_CASE(
    "sim, known fault: two hosts that replace a key at the same moment read their own values for ever") {
    Conditions c;
    c.puts = c.removes = c.pins = 0;
    c.keys = 2;
    expect_one(40, c, [](const Finding& f) { return f.kind == Finding::kOldValue && f.for_ever; });
}

// A node that was away is read before it has carried out its drops: by clients of its host, and by those that
// know the place.
TEST_CASE("sim, known fault: a node that was away gives a removed value until it has heard of the removal") {
    Conditions c = puts_and_removals();
    c.stops = 2;
    c.cuts = 1;
    expect_one(40, c, is_removed_for_a_while);
}

// The directory hears of a put some milliseconds later, and a removal asks it which nodes have the key.
TEST_CASE("sim, known fault: a removal right after another client's put misses the copy") {
    Conditions c = puts_and_removals();
    c.apart = 0;
    c.keys = 2;
    c.operations = 600;
    c.puts = c.removes = 4;
    expect_one(40, c, [](const Finding& f) { return f.kind == Finding::kRemovedValue; });
}

// What a node tells before the cut arrives behind it, on the old connection: the master takes the row for a
// put after the removal, and the node for one that was in touch.
TEST_CASE("sim, known fault: a put of a node that is cut off survives its removal for ever") {
    Conditions c = puts_and_removals();
    c.cuts = 2;
    expect_one(40, c, is_removed_for_ever);
}

// The call gave its own node up and put the object elsewhere; the node reads the frame when it goes on, and
// the key is back after its removal.
TEST_CASE("sim, known fault: a put that a standing node carries out late survives a removal for ever") {
    Conditions c = puts_and_removals();
    c.stops = 4;
    c.gets = 2;
    c.pins = 0;
    c.lasts = 5 * kSecond;
    expect_one(40, c, is_removed_for_ever);
}

// While the master is away a removal goes to the nodes that this client has heard of, maybe none, and while a
// new master fills up to those that have told it; it is acknowledged in any case.
TEST_CASE("sim, known fault: a removal while the master is away leaves copies for ever") {
    Conditions c = puts_and_removals();
    c.master_restarts = 1;
    c.gets = 1;
    c.pins = 0;
    c.operations = 60;
    c.lasts = 2500 * kMs;
    expect_one(40, c, is_removed_for_ever);
}
