// The simulator of a cluster: one seed is one history. Real code above a simulated world:
//
//   SimClient   PutSteps, SearchSteps, RemovalSteps, those of striped objects and what they know
//               (core/csrc/store/client)
//   SimNode     Pool, ObjectTable, Holdings, SsdTier, MemberProtocol (core/csrc/store/node,
//   core/csrc/directory),
//               and the log below SsdTier (core/csrc/ssd), which is stepped instead of having a thread
//   SimMaster   Master, MasterProtocol (core/csrc/directory)
//   frames      those of the wire, written and read by the same code as in production
//   ----------  simulated:
//   Network     delays, overtaking between connections, ends told once, twice or not at all, cut directions
//   SimDisk     slow, torn, failing or full; its content outlives the process, or part of it the power
//   Process     stands still, ends, starts again with or without its disk; a clock of its own
//   World       time, the queue of events, random numbers
//
// A history has three parts. make_plan() writes down what will happen, from the seed: operations of clients,
// and faults. run() carries that out; then it heals everything, waits until all nodes are back, and lets
// every client read every key twice. check() then looks at the history of each key (history.hpp), and run()
// at the books: master, pools, rows in the directory, pins, operations without an end.
//
// The plan is a list, so a finding is made smaller by leaving parts of it out as long as the same kind of
// finding remains (shrink()). explain() prints what is left, with the seed.
//
// Conditions say which faults and operations there are. The tests have three kinds:
//   test_known_faults  conditions under which today's protocol goes wrong: a finding is expected. The
//                      change that mends the protocol turns such a test around.
//   test_clean         conditions under which it must not go wrong: many seeds without a finding.
//   test_planted       mistakes planted into the processes (faults.hpp) that have to be found.
//
// What is not simulated yet: several directories of a node, groups and chains, handshakes,
// sockets that take no more bytes.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client.hpp"
#include "faults.hpp"
#include "history.hpp"
#include "master.hpp"
#include "network.hpp"
#include "node.hpp"
#include "world.hpp"

namespace moonpool::sim {

struct Conditions {
    uint32_t hosts = 3;   // with a node and a client each; each master has one of its own
    uint32_t ranges = 1;  // of shards, each with a master
    uint32_t keys = 8;
    uint32_t operations = 300;
    Micros lasts = 10 * kSecond;
    // Of all operations, in proportion. A key is either replaced (and put where no node has it: uniques), or
    // put without replace.
    uint32_t puts = 3, replaces = 3, gets = 6, removes = 2, pins = 1, uniques = 0;
    bool one_writer = false;  // puts, replacements and removals of a key come from one client
    Micros apart = 0;         // and each begins so long after the one before, at least
    // So many of each in a history.
    uint32_t restarts = 0;  // a node ends, and is back after a while
    bool disks = false;     // and has what it had: it was stopped, or killed, or its host lost power
    DiskFaults disk{};
    uint32_t memory_objects = 0;  // with disks: so many have room in a node's memory; 0: all
    uint32_t stops = 0;           // a node stands still
    uint32_t broken_links = 0;    // a node loses its connection to the master
    uint32_t cuts = 0;            // of a direction between two hosts, or both
    uint32_t master_restarts = 0;
    uint32_t client_restarts = 0, standby_restarts = 0;
    uint32_t clock_jumps = 0;
    uint32_t stripes = 0;      // so many of a hundred keys have striped objects
    uint32_t full = 0;         // so many of a hundred replacements find their node full of what is pinned
    bool standby = false;      // each master has one, on a host of its own
    bool owner_dies = false;   // at a time within the plan, for good; a while later the standby takes over
    bool owner_stops = false;  // it stands still, the standby takes over, and the owner goes on
    uint32_t hand_overs = 0;   // the standby asks for its owner's place, which becomes its standby
    MasterLimits limits{};
};

struct Action {
    enum Kind : uint8_t {
        kOperation,
        kRestart,
        kStop,
        kBreakLink,
        kCut,
        kRestartMaster,
        kRestartClient,
        kJumpClock,
        kOwnerDies,
        kRestartStandby,
        kOwnerStops,
        kHandOver
    };
    Kind kind = kOperation;
    Micros at = 0, lasts = 0;
    Operation operation{};         // kOperation
    uint32_t host = 0, other = 0;  // of the fault; kCut: other may be the master's
    bool flag = false;             // kRestart: silently, as of a host; kCut: both directions
    bool cleanly = false;          // kRestart, with a disk, if not silently: as at SIGTERM
};
using Plan = std::vector<Action>;

struct Report {
    std::optional<Finding> finding;
    std::vector<Operation> history;
    Micros begin = 0;  // of the plan
    uint64_t events = 0;
    uint32_t handed_over = 0;  // ranges whose first owner has become a standby
};

Plan make_plan(uint64_t seed, const Conditions& conditions);
Report run(uint64_t seed, const Conditions& conditions, const Plan& plan, const Planted& planted = {});
// Which findings count.
using Counts = std::function<bool(const Finding&)>;
// A part of the plan with such a finding; tries at most so many runs.
Plan shrink(uint64_t seed, const Conditions& conditions, Plan plan, const Planted& planted,
            const Counts& counts, int tries);
// The finding, the seed, and what happened to its key.
std::string explain(uint64_t seed, const Plan& plan, const Report& report);

// Runs seeds until one has a finding that counts.
struct Search {
    std::optional<uint64_t> seed;  // that has one
    Plan plan;                     // shrunk
    Report report;
    uint64_t seeds = 0, operations = 0;
};
Search search(
    uint64_t first_seed, uint64_t seeds, const Conditions& conditions, const Planted& planted = {},
    const Counts& counts = [](const Finding&) { return true; });

}  // namespace moonpool::sim
