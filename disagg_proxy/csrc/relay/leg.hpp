// Leg: one request's stay at one engine, from the choice to its answer's end: connect, send, receive. An
// exchange has one that answers the client and, where prefill and decode are apart, one that prefills.
//
//     away -> [connecting ->] waiting -> answered -> away       kLegStates has all transitions
//
// Each stay passes leave() exactly once: there the engine's count of requests and its breaker are settled.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/state.hpp"
#include "http/response_parser.hpp"
#include "relay/breaker.hpp"
#include "relay/counts.hpp"

namespace moonpool::relay {

class Engine;
class Exchange;
struct RelayContext;
class Upstream;

enum class LegState : uint8_t {
    kAway,        // at no engine
    kConnecting,  // the engine is chosen and counts the request; nothing of it is sent
    kWaiting,     // for an answer: nothing that came of it is of use yet
    kAnswered,
};

inline constexpr Transitions<LegState, 4> kLegStates{
    "relay::Leg",
    {
        {LegState::kAway, "away", {LegState::kConnecting, LegState::kWaiting}},
        {LegState::kConnecting, "connecting", {LegState::kWaiting, LegState::kAway}},
        // To connecting: the idle connection that was taken turned out to be closed.
        {LegState::kWaiting, "waiting", {LegState::kConnecting, LegState::kAnswered, LegState::kAway}},
        {LegState::kAnswered, "answered", {LegState::kWaiting, LegState::kAway}},
    }};
static_assert(kLegStates.is_complete());

class Leg {
   public:
    Leg(RelayContext& context, Exchange& exchange) : context_(context), exchange_(exchange) {}
    Leg(const Leg&) = delete;

    // The message: fill these, then go(). The body's pieces must stay where they are until the leg has left.
    std::string head;
    std::vector<std::string_view> body;
    bool head_only = false;
    size_t message_bytes = 0;  // set by go()

    void go(Engine& engine);
    void leave(Verdict verdict);
    // The same, and what the engine still has to say is read and dropped.
    void leave_drained(Verdict verdict);
    void sweep(double now);
    // Whether the answer has begun. Its head begins it, unless the exchange says that it is of no use alone.
    bool answered() const { return state_ == LegState::kAnswered; }
    void set_answered(bool answered);
    // The engine has answered no health check since then: give up, sooner where the request can go elsewhere,
    // unless it made progress.
    void engine_silent(double since);
    // Whether the engine has got something of the request: if it breaks now, that may be why.
    bool exposed() const { return exposed_; }
    // Whether the connection has ended, though the relay has not read that yet.
    bool is_cut() const;
    // The engine was removed, and its requests have had their time.
    void engine_removed();
    void pause();
    void resume();
    bool between_events() const;

    // What the connection calls.
    void connected();
    void cannot_connect(int error);
    void cannot_speak(std::string why);  // TLS has failed, and the engine has read nothing of the request
    void received(const http::ResponseHead* head, std::string_view body, bool complete);
    void went_stale();
    void failed(Reason reason, std::string why);

    Engine* engine = nullptr;  // while it is there
    double sent_at = 0;
    size_t index = 0;  // among the engine's legs

   private:
    void connect();
    void send();

    RelayContext& context_;
    Exchange& exchange_;
    Upstream* upstream_ = nullptr;
    State<kLegStates> state_;
    bool trial_ = false;       // the one request that a breaker lets through
    bool fresh_only_ = false;  // an idle connection was closed under it: takes no other idle one
    bool paused_ = false;      // the client takes too little: reads nothing for now
    bool exposed_ = false;     // the engine has got something of the request
    double progress_at_ = 0;
    double deadline_ = std::numeric_limits<double>::infinity();
};

}  // namespace moonpool::relay
