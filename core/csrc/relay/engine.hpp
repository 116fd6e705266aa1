// Engine: all that the relay knows of one engine, and its open connections. The relay's thread alone touches
// it, but for in_flight, which policies read.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "relay/breaker.hpp"
#include "relay/counts.hpp"
#include "relay/settings.hpp"
#include "relay/upstream.hpp"

namespace moonpool::relay {

class Leg;

class Engine {
   public:
    Engine(size_t place, const EngineSettings& settings, const BreakerLimits& limits)
        : place(place), settings(settings), role(settings.role), breaker(limits) {}

    const size_t place;
    const EngineSettings settings;
    Role role;  // as the engine itself says, once it has
    Breaker breaker;
    EngineCounts counts;
    bool healthy = false;
    double answered_at = 0;  // the last good health check; 0: there was none
    sockaddr_storage address{};
    socklen_t address_size = 0;
    std::vector<Leg*> legs;  // the requests that are there now; each knows its index
    std::atomic<uint32_t> in_flight{0};

    // The models it said it serves; none: it did not say, so it may serve any.
    std::optional<std::vector<std::string>> models;
    bool serves(const std::string& model) const {
        return model.empty() || !models || std::find(models->begin(), models->end(), model) != models->end();
    }

    // Connections. All open ones, idle or not; each knows its index.
    std::vector<std::unique_ptr<Upstream>> open;
    std::vector<Upstream*> idle;  // the one that was used last is used next; the oldest is first

    bool whole() const {
        return breaker.whole() && idle.size() <= open.size() && legs.size() == in_flight.load();
    }
};

}  // namespace moonpool::relay
