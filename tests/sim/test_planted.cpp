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

// Two hosts replace a key at any moment.
Conditions with_replacements() {
    Conditions c;
    c.puts = c.removes = c.pins = 0;
    c.keys = 2;
    return c;
}

// A node is away while a removal is ordered, and back when another master is there.
Conditions with_new_masters() {
    Conditions c = with_drops();
    c.broken_links = 0;
    c.restarts = 2;
    c.master_restarts = 2;
    c.removes = 6;
    return c;
}

// Puts that nodes carry out late.
Conditions with_late_puts() {
    Conditions c;
    c.replaces = 0;
    c.apart = 300 * kMs;
    c.stops = 4;
    c.gets = 2;
    c.pins = 0;
    c.lasts = 5 * kSecond;
    return c;
}

// The line between the masters is cut, and the owner dies before it has noticed.
Conditions with_a_standby() {
    Conditions c;
    c.cuts = 6;
    c.lasts = 4 * kSecond;
    c.operations = 600;
    c.standby = c.owner_dies = true;
    return c;
}

// The owner stands still while its standby takes over, and goes on.
Conditions with_a_former_owner() {
    Conditions c;
    c.puts = c.pins = 0;
    c.keys = 2;
    c.cuts = 4;
    c.standby = c.owner_stops = true;
    return c;
}

// Replacements and removals that nodes carry out late.
Conditions with_late_replacements() {
    Conditions c;
    c.puts = c.pins = 0;
    c.keys = 2;
    c.removes = c.stops = 4;
    c.cuts = 2;
    return c;
}

// Nodes are away while removals are ordered, and back under another master; others have restarted.
Conditions with_masters_and_nodes_that_restart() {
    Conditions c = with_drops();
    c.removes = 6;
    c.stops = c.master_restarts = 2;
    return c;
}

// A node is silent to a put, which goes to another one.
Conditions with_second_attempts() {
    Conditions c;
    c.replaces = 0;
    c.apart = 300 * kMs;
    c.stops = c.cuts = c.broken_links = 2;
    return c;
}

// Two hosts put a key where no node has it, at any moment.
Conditions with_unique_puts() {
    Conditions c;
    c.puts = c.replaces = c.pins = 0;
    c.keys = 2;
    c.uniques = 4;
    return c;
}

// Keys of two masters, one of which restarts, and nodes that restart, or carry puts out late.
Conditions with_two_ranges() {
    Conditions c = with_late_puts();
    c.ranges = 2;
    c.restarts = c.master_restarts = 1;
    c.disks = true;
    return c;
}

// Objects live on disks alone, and hosts lose their power.
Conditions with_disks() {
    Conditions c = with_drops();
    c.removes = 6;
    c.restarts = 4;
    c.memory_objects = 4;
    c.disk = {.torn = true, .slow_ms = 20};
    return c;
}

// A key is removed while it is being written.
Conditions with_slow_disks() {
    Conditions c = with_disks();
    c.disk.slow_ms = 1000;
    return c;
}

bool is_removed_value(const Finding& finding) { return finding.kind == Finding::kRemovedValue; }

// Striped objects, and nodes that lose what they have.
Conditions with_stripes() {
    Conditions c;
    c.apart = 300 * kMs;
    c.stripes = 100;
    c.restarts = 2;
    return c;
}

// Striped objects that two clients replace and remove at any moment.
Conditions with_striped_replacements() {
    Conditions c;
    c.puts = 0;
    c.pins = 2;
    c.keys = 2;
    c.stripes = 100;
    return c;
}

// The same, while some nodes do not answer: many a change is not acknowledged.
Conditions with_unsure_striped_replacements() {
    Conditions c = with_striped_replacements();
    c.cuts = c.stops = 2;
    return c;
}

// Two hosts replace a striped object again and again; it is never removed.
Conditions with_striped_replacements_alone() {
    Conditions c = with_striped_replacements();
    c.removes = c.pins = 0;
    c.hosts = 2;
    c.lasts = kSecond / 2;
    c.operations = 100;
    return c;
}

// first: of a mistake that few histories show.
void expect_found(
    const Planted& planted, const Conditions& conditions = with_drops(), uint64_t seeds = kSeeds,
    uint64_t first = 1, const Counts& counts = [](const Finding&) { return true; }) {
    Search found = search(first, seeds, conditions, planted, counts);
    REQUIRE(found.seed);
    MESSAGE(explain(*found.seed, found.plan, found.report));
}

}  // namespace

TEST_CASE("sim, planted: nothing is found without a mistake") {
    for (const Conditions& conditions :
         {with_drops(), with_replacements(), with_new_masters(), with_late_puts(), with_a_standby(),
          with_a_former_owner(), with_late_replacements(), with_masters_and_nodes_that_restart(),
          with_second_attempts(), with_unique_puts(), with_two_ranges(), with_disks(), with_slow_disks(),
          with_stripes(), with_striped_replacements(), with_unsure_striped_replacements(),
          with_striped_replacements_alone()}) {
        Search found = search(1, 2 * kSeeds, conditions);
        if (found.seed) FAIL(explain(*found.seed, found.plan, found.report));
    }
}

TEST_CASE("sim, planted: a drop that is confirmed and not carried out") { expect_found({.drop_lost = true}); }

TEST_CASE("sim, planted: a pin that was promised and is not there") {
    expect_found({.pin_lost = true}, with_drops(), 60);
}

TEST_CASE("sim, planted: a removal that was answered and not carried out") {
    expect_found({.removal_lost = true});
}

TEST_CASE("sim, planted: a client that says of all nodes that they know of its removal") {
    expect_found({.all_told = true});
}

TEST_CASE("sim, planted: a replacement that was answered and not carried out") {
    expect_found({.replace_lost = true}, with_replacements());
}

TEST_CASE("sim, planted: nodes that tell a new master of no removals") {
    expect_found({.handover_lost = true}, with_new_masters(), 60);
}

TEST_CASE("sim, planted: an owner that gives removals their places before its standby has heard of them") {
    expect_found({.standby_late = true}, with_a_standby(), 60);
}

TEST_CASE("sim, planted: a former owner that goes on when its standby has taken over") {
    expect_found({.term_ignored = true}, with_a_former_owner(), kSeeds, 570);
}

TEST_CASE("sim, planted: a node that puts what is older than a replacement it was told of") {
    expect_found({.older_taken = true}, with_late_replacements(), kSeeds, 1045);
}

TEST_CASE("sim, planted: a client that tells no second node") {
    expect_found({.one_told = true}, with_masters_and_nodes_that_restart(), kSeeds, 3380);
}

TEST_CASE("sim, planted: a disk that says what it is right up to before it is") {
    expect_found({.applied_early = true}, with_disks(), 60, 1, is_removed_value);
}

TEST_CASE("sim, planted: a log's tail is on the disk before what it vouches for") {
    expect_found({.tail_early = true}, with_disks());
}

TEST_CASE("sim, planted: what is being written to a disk survives its removal") {
    expect_found({.write_survives = true}, with_slow_disks(), kSeeds, 1, is_removed_value);
}

TEST_CASE("sim, planted: each attempt of a put comes after the removals known by then") {
    expect_found({.put_anew = true}, with_second_attempts(), kSeeds, 1295);
}

TEST_CASE("sim, planted: a key that two ranges take") {
    expect_found({.two_ranges = true}, with_two_ranges());
}

TEST_CASE("sim, planted: a client that puts what the master says another node has") {
    expect_found({.unique_believes_itself = true}, with_unique_puts());
}

TEST_CASE("sim, planted: a put that comes after the removals of another range") {
    expect_found({.versions_mixed = true}, with_two_ranges(), 60);
}

TEST_CASE("sim, planted: a released pin that stays") { expect_found({.unpin_lost = true}); }

TEST_CASE("sim, planted: changes that a node does not tell") { expect_found({.rows_lost = true}); }

TEST_CASE("sim, planted: a reader that is overtaken keeps stripes of the object before") {
    expect_found({.stripes_mixed = true}, with_striped_replacements());
}

TEST_CASE("sim, planted: a lost stripe that does not free the rest of its object") {
    expect_found({.stripes_left = true}, with_stripes());
}

TEST_CASE("sim, planted: a client that says of an object without a stripe that it is there") {
    expect_found({.stripes_unasked = true}, with_stripes(), 60);
}

TEST_CASE("sim, planted: a pin on the first stripe alone") {
    expect_found({.stripes_unpinned = true}, with_striped_replacements());
}

TEST_CASE("sim, planted: a removal that leaves the stripes") {
    expect_found({.stripes_unremoved = true}, with_striped_replacements());
}

TEST_CASE("sim, planted: a replacement that was overtaken and leaves its stripes") {
    expect_found({.stripes_overtaken = true}, with_striped_replacements());
}

// Where others were not acknowledged: not each stripe that stays is one of theirs.
TEST_CASE("sim, planted: a replacement that was overtaken between others of which no node said anything") {
    expect_found({.stripes_overtaken = true}, with_unsure_striped_replacements(), 4);
}

TEST_CASE("sim, planted: a replacement that frees the stripes of a later one") {
    expect_found({.stripes_later = true}, with_striped_replacements_alone(), 60);
}
