// KNOWN FAULTS of the protocol: each case says under which conditions a finding is expected. A protocol
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

}  // namespace

// The directory hears of a put some milliseconds later, and a removal asks it which nodes have the key. The
// copy goes as soon as its node has told of it; until then clients of its host read it.
TEST_CASE("sim, known fault: a removal right after another client's put leaves the copy for a moment") {
    Conditions c;
    c.replaces = 0;
    c.keys = 2;
    c.operations = 600;
    c.puts = c.removes = 4;
    expect_one(60, c, [](const Finding& f) { return f.kind == Finding::kRemovedValue && !f.for_ever; });
}
