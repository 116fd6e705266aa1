// Leg: one request's stay at one engine, from the choice to its answer's end: connect, send, receive. An
// exchange has one that answers the client and, where prefill and decode are apart, one that prefills.
//
// Each stay passes leave() exactly once: there the engine's count of requests and its breaker are settled.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "http/response_parser.hpp"
#include "relay/breaker.hpp"
#include "relay/counts.hpp"

namespace moonpool::relay {

class Engine;
class Exchange;
class Relay;
class Upstream;

class Leg {
   public:
    Leg(Relay& relay, Exchange& exchange) : relay_(relay), exchange_(exchange) {}
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
    void received(const http::ResponseHead* head, std::string_view body, bool complete);
    void went_stale();
    void failed(Reason reason, std::string why);

    Engine* engine = nullptr;  // while it is there
    bool answered = false;     // the answer's head has come
    double sent_at = 0;
    size_t index = 0;  // among the engine's legs

   private:
    void connect();
    void send();

    Relay& relay_;
    Exchange& exchange_;
    Upstream* upstream_ = nullptr;
    bool trial_ = false, fresh_only_ = false, paused_ = false, exposed_ = false;
    double progress_at_ = 0;
    double deadline_ = std::numeric_limits<double>::infinity();
    bool connecting_ = false;
};

}  // namespace moonpool::relay
