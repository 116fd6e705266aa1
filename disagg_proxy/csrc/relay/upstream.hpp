// Upstream: one connection to an engine, which carries one request at a time.
//
// Whose it is: the engine's pool while it is idle, a leg's from its start until its answer is complete or the
// leg lets go. A connection whose leg let go in mid answer is closed at once: that is how an engine learns
// that no client waits any more. Or the rest of the answer is read and dropped, for linger_s at most.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "http/body_reader.hpp"
#include "http/response_parser.hpp"
#include "relay/poller.hpp"
#include "relay/transport.hpp"

namespace moonpool::relay {

class Engine;
class Leg;
struct RelayContext;

class Upstream final : public Socket {
   public:
    Upstream(RelayContext& context, Engine& engine) : context_(context), engine_(engine) {}

    // Begin to connect; the leg hears of it. An errno, or 0.
    int connect(Leg& leg);
    // Send the leg's request; the answer goes to it.
    void send(Leg& leg);
    // The leg wants no more: close, whatever the engine is doing.
    void let_go(Leg& leg);
    // The leg wants no more of an answer that comes anyway.
    void drain(Leg& leg);
    void close();
    void pause();
    void resume();

    bool between_events() const { return headed_ && event_stream_ && body_.between_events(); }
    // Whether the engine has closed or reset it; reads nothing.
    bool is_cut() const;
    void on_events(uint32_t events) override;

    size_t index = 0;  // among the engine's open ones
    double idle_since = 0;
    double drained_until = 0;  // 0: it is not being drained

   private:
    void finish_connecting();
    void shake_hands();
    void refused_tls(std::string why);
    void write_more();
    void read_some();
    void ended();
    void feed(std::string_view bytes);
    void deliver(bool first, std::string_view body, bool complete);
    void give_back();
    void fail_answer(std::string why);
    void watch();

    RelayContext& context_;
    Engine& engine_;
    bool closed_ = false;
    Leg* leg_ = nullptr;
    Transport transport_;
    bool connecting_ = false;  // until the handshake of TLS is over, where the engine has it
    bool paused_ = false, reused_ = false;
    size_t unsent_ = 0;  // of the leg's message
    size_t received_ = 0;
    bool headed_ = false, event_stream_ = false;
    http::ResponseParser parser_;
    http::BodyReader body_;
    std::string partial_;  // a head that is not whole
};

}  // namespace moonpool::relay
