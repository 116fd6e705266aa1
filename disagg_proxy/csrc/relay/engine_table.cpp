#include "relay/engine_table.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "relay/leg.hpp"

namespace moonpool::relay {

EngineTable::EngineTable(RelayContext& context, Decider& decider) : context_(context), decider_(decider) {
    const Settings& settings = context.settings;
    size_t places = std::max(settings.engines_max, settings.engines.size());
    statuses_ = std::make_unique<EngineStatus[]>(places);
    names_.resize(places);
    engines_.resize(places);
    for (size_t place = 0; place < settings.engines.size(); ++place) add(place, settings.engines[place]);
}

void EngineTable::add(size_t place, const EngineSettings& engine) {
    if (engines_[place]) return;  // it is not free
    engines_[place] = std::make_unique<Engine>(place, engine, context_.settings.breaker, statuses_[place]);
    names_[place] = engine.name;
}

void EngineTable::remove(size_t place, double drain_s) {
    Engine* engine = staying(place);
    if (engine == nullptr) return;
    engine->healthy = false;
    engine->removal = ++removals_;
    engine->leaves_at = context_.now + drain_s;
    engine->close_idle();
    look_at_models();
}

void EngineTable::set_models(size_t place, std::optional<std::vector<std::string>> models) {
    Engine* engine = staying(place);
    if (engine == nullptr) return;
    engine->models = std::move(models);
    look_at_models();
}

Engine* EngineTable::staying(size_t place) const {
    Engine* engine = engines_[place].get();
    return engine == nullptr || engine->leaving() ? nullptr : engine;
}

void EngineTable::look_at_models() {
    models_known_ = std::any_of(engines_.begin(), engines_.end(), [](const auto& engine) {
        return engine && !engine->leaving() && engine->models.has_value();
    });
}

size_t EngineTable::count() const {
    return static_cast<size_t>(std::count_if(
        engines_.begin(), engines_.end(), [](const auto& engine) { return engine && !engine->leaving(); }));
}

bool EngineTable::has(const Plan& plan) const {
    return staying(static_cast<size_t>(plan.engine)) != nullptr &&
           (plan.prefill < 0 || staying(static_cast<size_t>(plan.prefill)) != nullptr);
}

bool EngineTable::candidates(Request& request, const std::vector<uint16_t>& tried,
                             std::vector<uint16_t>& out) const {
    static const std::string kAny;
    const std::string& model = models_known_ && !request.body.empty() ? request.facts().model : kAny;
    bool known = false, any = false;
    std::array<bool, 3> works{};
    for (auto& engine : engines_) {
        if (!engine || engine->leaving()) continue;
        any = true;
        if (!engine->serves(model)) continue;
        known = true;
        if (!engine->healthy) continue;
        auto place = static_cast<uint16_t>(engine->place);
        if (std::find(tried.begin(), tried.end(), place) != tried.end()) continue;
        out.push_back(place);
        if (engine->works(context_.now)) works[static_cast<size_t>(engine->role)] = true;
    }
    std::erase_if(out, [&](uint16_t place) {
        const Engine& engine = *engines_[place];
        return works[static_cast<size_t>(engine.role)] && !engine.works(context_.now);
    });
    return known || !any;
}

void EngineTable::refused(Engine& engine, const std::string& why) {
    engine.healthy = false;
    decider_.engine_refused(engine.place, why);
}

void EngineTable::sweep(const std::function<bool(const Engine&)>& in_use) {
    for (auto& engine : engines_) {
        if (engine) sweep_engine(*engine);
        if (!engine || !engine->leaving()) continue;
        if (context_.now >= engine->leaves_at) {
            std::vector<Leg*> legs = engine->legs;
            for (Leg* leg : legs) {
                if (leg->engine == engine.get()) leg->engine_removed();
            }
        }
        if (!engine->legs.empty() || !engine->open.empty() || in_use(*engine)) continue;
        size_t place = engine->place;
        retired_.push_back(std::move(engine));
        decider_.engine_gone(place);
    }
}

void EngineTable::sweep_engine(Engine& engine) {
    const Deadlines& deadlines = context_.settings.deadlines;
    double now = context_.now;
    size_t expired = 0;
    double horizon = now - deadlines.upstream_idle_s;
    while (expired < engine.idle.size() && engine.idle[expired]->idle_since <= horizon) ++expired;
    std::vector<Upstream*> old(engine.idle.begin(), engine.idle.begin() + static_cast<ptrdiff_t>(expired));
    for (const auto& upstream : engine.open) {
        if (upstream->drained_until > 0 && now >= upstream->drained_until) old.push_back(upstream.get());
    }
    for (Upstream* upstream : old) upstream->close();
    if (engine.leaving()) return;  // its health is not checked any more
    if (!engine.is_suspect() || engine.answered_at == 0) return;
    if (now - engine.answered_at < std::max(deadlines.suspect_engine_s, engine.patience_s)) return;
    std::vector<Leg*> legs = engine.legs;
    for (Leg* leg : legs) {
        if (leg->engine == &engine) leg->engine_silent(engine.answered_at);
    }
}

void EngineTable::close_all() {
    for (auto& engine : engines_) {
        while (engine && !engine->open.empty()) engine->open.back()->close();
    }
}

bool EngineTable::check_integrity() const {
    return std::all_of(engines_.begin(), engines_.end(),
                       [](const auto& engine) { return !engine || engine->check_integrity(); });
}

}  // namespace moonpool::relay
