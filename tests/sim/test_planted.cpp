// Mistakes planted into the simulated processes: the same seeds have no such finding without the mistake, and
// one with it.
#include <doctest/doctest.h>

#include "cluster.hpp"

using namespace moonpool::sim;

namespace {

constexpr uint64_t kSeeds = 12;

// Nodes restart with their disks and lose their masters: there is always something to drop.
Conditions with_drops() {
    Conditions c;
    c.replaces = 0;
    c.apart = 300 * kMs;
    c.restarts = 3;
    c.disks = true;
    c.broken_links = 2;
    return c;
}

bool is_planted(const Finding& f) {
    return f.for_ever || f.kind == Finding::kOldValue || f.kind == Finding::kPinLost ||
           f.kind == Finding::kBooks;
}

// Each key has one writer, so that replacements have an order today, too.
Conditions with_replacements() {
    Conditions c;
    c.one_writer = true;
    return c;
}

void expect_found(const Planted& planted, const Conditions& conditions = with_drops()) {
    Search found = search(1, kSeeds, conditions, planted, is_planted);
    REQUIRE(found.seed);
    MESSAGE(explain(*found.seed, found.plan, found.report));
}

}  // namespace

TEST_CASE("sim, planted: nothing is found without a mistake") {
    for (const Conditions& conditions : {with_drops(), with_replacements()}) {
        Search found = search(1, kSeeds, conditions, {}, is_planted);
        if (found.seed) FAIL(explain(*found.seed, found.plan, found.report));
    }
}

TEST_CASE("sim, planted: a drop that is confirmed and not carried out") { expect_found({.drop_lost = true}); }

TEST_CASE("sim, planted: a time of the master that is too late") { expect_found({.times_wrong = true}); }

TEST_CASE("sim, planted: a pin that was promised and is not there") { expect_found({.pin_lost = true}); }

TEST_CASE("sim, planted: a removal that was answered and not carried out") {
    expect_found({.removal_lost = true});
}

TEST_CASE("sim, planted: a client that does not name the nodes it could not reach") {
    expect_found({.unreached_lost = true});
}

TEST_CASE("sim, planted: a removal of which the master is not told") { expect_found({.forget_lost = true}); }

TEST_CASE("sim, planted: a replacement that was answered and not carried out") {
    expect_found({.replace_lost = true}, with_replacements());
}

TEST_CASE("sim, planted: a released pin that stays") { expect_found({.unpin_lost = true}); }

TEST_CASE("sim, planted: changes that a node does not tell") { expect_found({.rows_lost = true}); }
