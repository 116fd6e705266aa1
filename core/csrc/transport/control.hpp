// The control channel: questions, answers and messages between two engines, beside the bytes of transfers. A
// peer has exactly one, whichever transports carry its slices.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "transport/identity.hpp"
#include "wire/frame.hpp"
#include "wire/listener.hpp"

namespace moonpool::transport {

// To one peer. Thread-safe.
class Control {
   public:
    virtual ~Control() = default;

    // One question and its answer's body, waiting at most timeout_ms without progress. An ERROR of the peer
    // is the error. Kind::kEngineNotify is sent once at most, others again when a connection was dead.
    virtual Result<std::vector<std::byte>> ask(Kind kind, const std::vector<std::byte>& body,
                                               int timeout_ms) = 0;
    // The same without waiting: answered() is called once, on any thread, and must not wait.
    using Answered = std::function<void(Result<std::vector<std::byte>>)>;
    virtual void post(Kind kind, const std::vector<std::byte>& body, int timeout_ms, Answered answered) = 0;
    virtual std::string path() const = 0;  // for people
    // Questions that wait fail soon, later ones at once. Idempotent.
    virtual void close() = 0;
};

struct Contact {
    PeerInfo info;
    std::shared_ptr<Control> control;
};

// The transport by which engines find each other: one of an engine's. It does so also when the user allows it
// no slices.
class ControlCarrier {
   public:
    virtual ~ControlCarrier() = default;

    // A connection of another engine that has proved the token. Any thread.
    virtual void adopt(AuthenticatedConnection caller) = 0;
    // The handshake with the engine at "host:port".
    virtual Result<Contact> call(const std::string& address) = 0;
};

}  // namespace moonpool::transport
