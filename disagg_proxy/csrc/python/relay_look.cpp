#include "python/relay_look.hpp"

#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>
#include <vector>

namespace moonpool::python {

namespace py = pybind11;

namespace {

// Of one engine, copied on the relay's thread.
struct EngineLook {
    size_t place;
    std::string name;
    bool leaving;
    relay::EngineCounts counts;
    bool healthy, breaker_closed;
    uint32_t failures;
    size_t in_flight, connections, idle;
};

struct Look {
    std::vector<EngineLook> engines;
    std::map<std::string, uint64_t> rejected;
    size_t clients = 0, held = 0, unread = 0;
    uint64_t accepted = 0, dropped = 0, unlogged = 0;
    std::array<uint64_t, 3> reserved{};
    std::string handshake_failure;
    bool intact = true;
};

Look look_at(const relay::Relay& relay) {
    Look look;
    for (const auto& engine : relay.engines().all()) {
        if (!engine) continue;
        look.engines.push_back({engine->place, engine->settings.name, engine->leaving(), engine->counts,
                                engine->healthy, engine->breaker.closed(), engine->breaker.failures(),
                                engine->legs.size(), engine->open.size(), engine->idle.size()});
    }
    const relay::RelayContext& context = relay.context();
    look.rejected.insert(context.rejected.begin(), context.rejected.end());
    look.clients = relay.clients().all().size();
    look.held = relay.clients().budget.body_bytes();
    look.unread = relay.clients().budget.unread_bytes();
    look.reserved = context.reserved;
    look.handshake_failure = context.handshake_failure;
    look.accepted = relay.clients().accepted();
    look.dropped = context.observations.dropped();
    look.unlogged = context.access_log ? context.access_log->dropped() : 0;
    look.intact = relay.check_integrity();
    return look;
}

// Counts by their names; those that are 0 are left out.
template <class Counts, class Names>
py::dict by_name(const Counts& counts, const Names& names) {
    py::dict found;
    for (size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] > 0) found[names[i]] = counts[i];
    }
    return found;
}

py::tuple histogram(const relay::Latencies& latencies) {
    return py::make_tuple(latencies.counts(), latencies.sum_s());
}

constexpr std::array<const char*, 2> kFailedStages = {"before_first_byte", "after_first_byte"};
constexpr std::array<const char*, 3> kReserved = {"member", "field", "request_id"};
constexpr std::array<const char*, 2> kLeftStages = {"waiting", "streaming"};

py::dict row_of(const EngineLook& engine) {
    const relay::EngineCounts& counts = engine.counts;
    py::dict failures;
    for (size_t stage = 0; stage < kFailedStages.size(); ++stage) {
        for (auto [reason, count] : by_name(counts.failures[stage], relay::kReasons)) {
            failures[py::make_tuple(kFailedStages[stage], reason)] = count;
        }
    }
    py::dict row;
    row["place"] = engine.place;
    row["name"] = engine.name;
    row["leaving"] = engine.leaving;
    row["healthy"] = engine.healthy;
    row["breaker_closed"] = engine.breaker_closed;
    row["failures_in_a_row"] = engine.failures;
    row["in_flight"] = engine.in_flight;
    row["connections"] = engine.connections;
    row["idle"] = engine.idle;
    row["answers"] = counts.answers;
    row["failures"] = failures;
    row["disconnects"] = by_name(counts.disconnects, kLeftStages);
    row["prefills"] = by_name(counts.prefills, relay::kPrefills);
    row["retries"] = counts.retries;
    row["relayed_bytes"] = counts.relayed_bytes;
    row["first_byte"] = histogram(counts.first_byte);
    row["whole"] = histogram(counts.whole);
    row["prefill"] = histogram(counts.prefill);
    return row;
}

}  // namespace

py::dict relay_counters(relay::Relay& relay, uint64_t policy_errors) {
    Look look;
    {
        py::gil_scoped_release nogil;
        relay.call([&] { look = look_at(relay); });
    }
    py::list engines;
    for (const EngineLook& engine : look.engines) engines.append(row_of(engine));
    py::dict out;
    out["engines"] = engines;
    out["rejected"] = look.rejected;
    out["reserved"] = by_name(look.reserved, kReserved);
    out["handshake_failure"] = look.handshake_failure;
    out["client_connections"] = look.clients;
    out["held_body_bytes"] = look.held;
    out["unread_bytes"] = look.unread;
    out["accepted"] = look.accepted;
    out["observations_dropped"] = look.dropped;
    out["log_lines_dropped"] = look.unlogged;
    out["policy_errors"] = policy_errors;
    out["intact"] = look.intact;
    return out;
}

py::list relay_clients(relay::Relay& relay) {
    std::vector<relay::Client::Look> looks;
    {
        py::gil_scoped_release nogil;
        relay.call([&] {
            for (const auto& client : relay.clients().all()) looks.push_back(client->look());
        });
    }
    py::list out;
    for (const auto& look : looks) {
        py::dict row;
        row["busy"] = look.busy;
        row["lingering"] = look.lingering;
        row["held_back"] = look.held_back;
        row["write_paused"] = look.write_paused;
        row["reading_body"] = look.reading_body;
        row["held"] = look.held;
        row["body"] = look.body;
        row["unwritten"] = look.unwritten;
        out.append(row);
    }
    return out;
}

}  // namespace moonpool::python
