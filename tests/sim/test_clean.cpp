// Conditions under which today's protocol has to be right: no finding in any seed. And that a seed is a
// history.
#include <doctest/doctest.h>

#include <chrono>
#include <iostream>

#include "cluster.hpp"

using namespace moonpool::sim;

namespace {

// Writes of a key come apart from each other, so that the directory has heard of one before the next: today's
// protocol promises nothing else (docs/cluster.md).
Conditions clean_conditions() {
    Conditions c;
    c.apart = 300 * kMs;
    return c;
}

void expect_none(const char* what, uint64_t seeds, const Conditions& conditions) {
    auto begin = std::chrono::steady_clock::now();
    Search found = search(1, seeds, conditions);
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::cerr << what << ": " << found.seeds << " seeds, " << found.operations << " operations, "
              << static_cast<uint64_t>(static_cast<double>(found.operations) / took.count())
              << " operations a second\n";
    if (found.seed) FAIL(explain(*found.seed, found.plan, found.report));
}

}  // namespace

TEST_CASE("sim: delays and overtaking alone lead to no finding") {
    expect_none("sim, delays", 25, clean_conditions());
}

TEST_CASE("sim: clients that end, and clocks that jump, lead to no finding") {
    Conditions c = clean_conditions();
    c.client_restarts = 2;
    c.clock_jumps = 2;
    expect_none("sim, clients and clocks", 25, c);
}

TEST_CASE("sim: one client that writes a key at any pace, without faults, is never given an old value") {
    Conditions c;
    c.one_writer = true;
    expect_none("sim, one writer", 25, c);
}

TEST_CASE("sim: a seed is one history") {
    Conditions c;
    c.restarts = c.stops = c.cuts = c.master_restarts = 1;
    c.disks = true;
    Plan plan = make_plan(7, c);
    Report first = run(7, c, plan), second = run(7, c, plan);
    REQUIRE(first.history.size() == second.history.size());
    CHECK(first.events == second.events);
    for (size_t i = 0; i < first.history.size(); ++i) {
        CHECK(to_text(first.history[i]) == to_text(second.history[i]));
    }
}
