#include "relay/leg.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "relay/context.hpp"
#include "relay/engine.hpp"
#include "relay/exchange.hpp"

namespace moonpool::relay {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

std::string seconds(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g s", value);
    return text;
}

// Descriptors, ports or memory of ours: no engine is to blame.
bool is_own_lack(int error) {
    return error == EMFILE || error == ENFILE || error == EADDRNOTAVAIL || error == ENOBUFS ||
           error == ENOMEM;
}

}  // namespace

void Leg::go(Engine& chosen) {
    engine = &chosen;
    fresh_only_ = paused_ = exposed_ = false;
    sent_at = 0;
    message_bytes = head.size();
    for (std::string_view piece : body) message_bytes += piece.size();
    progress_at_ = context_.now;
    trial_ = chosen.breaker.started(context_.now);
    chosen.status.rests_until = chosen.breaker.rests_until();
    index = chosen.legs.size();
    chosen.legs.push_back(this);
    ++chosen.status.in_flight;
    if (chosen.idle.empty()) return connect();
    upstream_ = chosen.idle.back();
    chosen.idle.pop_back();
    send();
}

void Leg::connect() {
    upstream_ = &engine->add_upstream(context_);
    state_.move_to(LegState::kConnecting);
    deadline_ = context_.now + context_.settings.deadlines.connect_s;
    int error = upstream_->connect(*this);
    if (error == 0) return;
    upstream_->close();
    cannot_connect(error);
}

void Leg::connected() { send(); }

void Leg::send() {
    state_.move_to(LegState::kWaiting);
    sent_at = progress_at_ = context_.now;
    deadline_ = context_.now + context_.settings.deadlines.first_byte_s;
    exposed_ = true;
    exchange_.leg_sent(*this);
    upstream_->send(*this);
}

void Leg::cannot_connect(int error) {
    upstream_ = nullptr;
    if (is_own_lack(error)) return exchange_.leg_lacks(std::strerror(error));
    if (error == ECONNREFUSED) exchange_.leg_refused(*this, "refuses connections");
    failed(Reason::kConnect, std::string("cannot be reached: ") + std::strerror(error));
}

void Leg::cannot_speak(std::string why) {
    upstream_ = nullptr;
    exposed_ = false;
    exchange_.leg_refused(*this, why);
    failed(Reason::kConnect, "cannot be reached: " + why);
}

void Leg::received(const http::ResponseHead* answer, std::string_view bytes, bool complete) {
    progress_at_ = context_.now;
    deadline_ = context_.now + context_.settings.deadlines.stream_stall_s;
    if (answer != nullptr) set_answered(true);
    if (complete) upstream_ = nullptr;
    exchange_.leg_received(*this, answer, bytes, complete);
}

void Leg::set_answered(bool answered) {
    LegState state = answered ? LegState::kAnswered : LegState::kWaiting;
    if (state_ != state) state_.move_to(state);
}

void Leg::went_stale() {
    upstream_ = nullptr;
    if (fresh_only_) return failed(Reason::kLost, "closed the connection before its answer was complete");
    engine->close_idle();  // one idle connection turned out to be stale: its sisters are too
    fresh_only_ = true;    // the same engine once more: it did nothing wrong
    connect();
}

void Leg::failed(Reason reason, std::string why) {
    if (engine != nullptr) exchange_.leg_failed(*this, reason, std::move(why));
}

void Leg::sweep(double now) {
    if (engine == nullptr || now < deadline_) return;
    const Deadlines& limits = context_.settings.deadlines;
    if (state_ == LegState::kConnecting) {
        failed(Reason::kConnect, "did not accept a connection within " + seconds(limits.connect_s));
    } else if (paused_) {
        return;  // the client's own deadline decides
    } else if (answered()) {
        failed(Reason::kStalled, "sent nothing for " + seconds(limits.stream_stall_s) + " in mid answer");
    } else {
        failed(Reason::kFirstByte, "did not answer within " + seconds(limits.first_byte_s));
    }
}

void Leg::engine_silent(double since) {
    const Deadlines& limits = context_.settings.deadlines;
    double quiet_s = context_.now - std::max(since, progress_at_);
    if (quiet_s < std::max(limits.suspect_engine_s, engine->patience_s)) return;
    bool last = quiet_s >= std::max(limits.silent_engine_s, engine->patience_s);
    if (!last && !exchange_.may_move(*this)) return;
    char text[96];
    std::snprintf(text, sizeof(text), "answers neither this request nor its health checks for %.0f s",
                  quiet_s);
    failed(Reason::kSilent, text);
}

void Leg::engine_removed() { failed(Reason::kRemoved, "was removed before its answer was complete"); }

void Leg::pause() {
    paused_ = true;
    if (upstream_ != nullptr && state_ != LegState::kConnecting) upstream_->pause();
}

void Leg::resume() {
    paused_ = false;
    if (state_ == LegState::kConnecting) return;
    progress_at_ = context_.now;
    deadline_ = context_.now + context_.settings.deadlines.stream_stall_s;
    if (upstream_ != nullptr) upstream_->resume();  // else all of its answer is here, and held back
}

bool Leg::is_cut() const { return upstream_ != nullptr && upstream_->is_cut(); }

bool Leg::between_events() const { return upstream_ != nullptr && upstream_->between_events(); }

void Leg::leave_drained(Verdict verdict) {
    if (upstream_ != nullptr) upstream_->drain(*this);
    upstream_ = nullptr;
    leave(verdict);
}

void Leg::leave(Verdict verdict) {
    if (upstream_ != nullptr) upstream_->let_go(*this);
    upstream_ = nullptr;
    deadline_ = kNever;
    if (engine == nullptr) return;
    state_.move_to(LegState::kAway);
    Engine& left = *engine;
    engine = nullptr;
    left.legs[index] = left.legs.back();
    left.legs[index]->index = index;
    left.legs.pop_back();
    --left.status.in_flight;
    left.breaker.finished(verdict, context_.now, trial_);
    left.status.rests_until = left.breaker.rests_until();
}

}  // namespace moonpool::relay
