// RelayContext: what all parts of a relay work with, on its thread alone: the settings, the time, the poller,
// scratch memory, and what is counted. A part is given this and those that it calls, not the relay.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json/scanner.hpp"
#include "relay/access_log.hpp"
#include "relay/observations.hpp"
#include "relay/poller.hpp"
#include "relay/settings.hpp"

namespace moonpool::relay {

struct RelayContext {
    explicit RelayContext(Settings given)
        : settings(std::move(given)), observations(settings.limits.observations_max) {}

    const Settings settings;
    double now = 0;  // of this turn, s of the relay's clock
    // Steps of handshakes of TLS that are still done in this turn.
    size_t handshakes = 0, engine_handshakes = 0;
    bool draining = false;  // the relay accepts no more, and each answer is its connection's last
    Poller poller;
    std::vector<char> scratch = std::vector<char>(256 << 10);  // for what is read from a socket
    json::Object scratch_object;
    Observations observations;
    std::unique_ptr<AccessLog> access_log;                  // nullptr: none is written
    std::map<std::string, uint64_t, std::less<>> rejected;  // answers of the proxy's own, by their reason
    std::string handshake_failure;  // of the client whose handshake failed last, with its address
    // What clients may not say and was left out: members of bodies, fields of heads, ids.
    std::array<uint64_t, 3> reserved{};
    // Closed in this turn: the poller may have fetched an event of them, so that they are deleted after it.
    std::vector<std::unique_ptr<Socket>> retired;

    void defer_delete(std::unique_ptr<Socket> socket) { retired.push_back(std::move(socket)); }
    void count_rejected(std::string_view reason) {
        auto it = rejected.find(reason);
        if (it == rejected.end()) it = rejected.emplace(std::string(reason), 0).first;
        ++it->second;
    }
};

}  // namespace moonpool::relay
