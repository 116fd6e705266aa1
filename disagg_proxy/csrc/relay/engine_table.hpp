// EngineTable: the engines of a relay by their places, and which of them a request may go to. On the relay's
// thread, but for status().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "relay/context.hpp"
#include "relay/engine.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class EngineTable {
   public:
    EngineTable(RelayContext& context, Decider& decider);

    // From any thread.
    const EngineStatus& status(size_t place) const { return statuses_[place]; }

    void add(size_t place, const EngineSettings& engine);
    // Takes no request any more; those that are there have drain_s to end. sweep() does the rest.
    void remove(size_t place, double drain_s);
    void set_models(size_t place, std::optional<std::vector<std::string>> models);

    // By place; nullptr: it is free.
    const std::vector<std::unique_ptr<Engine>>& all() const { return engines_; }
    Engine& at(int place) const { return *engines_[static_cast<size_t>(place)]; }
    // nullptr: the place is free, or its engine is leaving.
    Engine* staying(size_t place) const;
    size_t count() const;                            // of those that stay
    uint64_t removals() const { return removals_; }  // of engines, so far
    bool models_known() const { return models_known_; }
    const std::vector<std::string>& names() const { return names_; }  // by place

    // Whether the engines of the plan stay.
    bool has(const Plan& plan) const;
    // Where a request may go: appends the places of healthy engines that serve its model and were not tried
    // for it. Those that rest, or are late with their health checks, are left out as long as another of the
    // same role is there. False: no engine, healthy or not, serves its model.
    bool candidates(Request& request, const std::vector<uint16_t>& tried, std::vector<uint16_t>& out) const;

    // It refuses connections, or their TLS: it gets no request until its next good health check.
    void refused(Engine& engine, const std::string& why);
    // in_use: whether a request is at the engine or may still go there.
    void sweep(const std::function<bool(const Engine&)>& in_use);
    void close_all();  // their connections
    void delete_retired() { retired_.clear(); }
    bool check_integrity() const;

   private:
    void sweep_engine(Engine& engine);
    void look_at_models();

    RelayContext& context_;
    Decider& decider_;
    std::unique_ptr<EngineStatus[]> statuses_;
    std::vector<std::string> names_;
    std::vector<std::unique_ptr<Engine>> engines_, retired_;
    uint64_t removals_ = 0;
    bool models_known_ = false;
};

}  // namespace moonpool::relay
