// Engine: all that the relay knows of one engine, and its open connections. The relay's thread alone touches
// it, but for what policies read of it, an EngineStatus.
//
//     there --remove--> leaving: no request begins --its requests and connections are over--> gone
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "relay/breaker.hpp"
#include "relay/counts.hpp"
#include "relay/settings.hpp"
#include "relay/upstream.hpp"

namespace moonpool::relay {

class Leg;

// What other threads may read of the engine at a place. Outlives it, since a reader holds nothing of it.
struct EngineStatus {
    std::atomic<uint32_t> in_flight{0};
    std::atomic<double> rests_until{0};  // of its breaker
};

class Engine {
   public:
    Engine(size_t place, const EngineSettings& settings, const BreakerLimits& limits, EngineStatus& status)
        : place(place), settings(settings), role(settings.role), breaker(limits), status(status) {
        status.rests_until = 0;  // of the one before
    }

    const size_t place;
    const EngineSettings settings;
    Role role;              // as the engine itself says, once it has
    double patience_s = 0;  // how long its health checks may take at the least, all that are allowed together
    uint32_t suspected = 0;  // pairs in a row, of which it was one, that did not come together
    Breaker breaker;
    EngineCounts counts;
    bool healthy = false;
    double answered_at = 0;  // the last good health check; 0: there was none
    uint32_t lates = 0;      // health checks since then that were not answered in time
    sockaddr_storage address{};
    socklen_t address_size = 0;
    std::vector<Leg*> legs;  // the requests that are there now; each knows its index
    EngineStatus& status;

    // Of one that leaves: when its requests are cut, and how many had been removed with it.
    double leaves_at = 0;
    uint64_t removal = 0;
    bool leaving() const { return removal > 0; }

    // Whether it is a good choice now: it neither rests nor is suspect.
    bool works(double now) const { return breaker.allows(now) && !is_suspect(); }

    // The models it said it serves; none: it did not say, so it may serve any.
    std::optional<std::vector<std::string>> models;
    bool serves(const std::string& model) const {
        return model.empty() || !models || std::find(models->begin(), models->end(), model) != models->end();
    }

    // One late check may be a pause, of the proxy itself, too; two in a row are the engine's.
    bool is_suspect() const { return lates >= 2; }

    // Connections. All open ones, idle or not; each knows its index.
    std::vector<std::unique_ptr<Upstream>> open;
    std::vector<Upstream*> idle;  // the one that was used last is used next; the oldest is first
    Upstream& add_upstream(RelayContext& context) {
        open.push_back(std::make_unique<Upstream>(context, *this));
        open.back()->index = open.size() - 1;
        return *open.back();
    }
    std::unique_ptr<Upstream> take_out(Upstream& upstream) {
        size_t index = upstream.index;
        std::unique_ptr<Upstream> taken = std::move(open[index]);
        if (index + 1 < open.size()) {
            open[index] = std::move(open.back());
            open[index]->index = index;
        }
        open.pop_back();
        return taken;
    }
    void close_idle() {
        while (!idle.empty()) idle.back()->close();
    }

    bool check_integrity() const {
        return breaker.check_integrity() && idle.size() <= open.size() &&
               legs.size() == status.in_flight.load();
    }
};

}  // namespace moonpool::relay
