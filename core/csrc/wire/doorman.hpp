// Doorman: the one listening TCP port of a process, whatever the process serves: a node's store, a transfer
// engine, a master. It sends the challenge, waits for the proof, answers it, and hands the socket to the
// service that the caller asked for. It reads nothing but the handshake, and parses nothing else before the
// proof. With `tls` nothing is said in plain but the reason why a caller that does not speak TLS is refused.
//
// One thread. Connections without proof have 5 s and at most 64 places; the longest waiting makes room, so
// that idle connections keep no caller out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/journal.hpp"
#include "base/result.hpp"
#include "wire/auth.hpp"
#include "wire/dial.hpp"
#include "wire/limits.hpp"
#include "wire/tls.hpp"

namespace moonpool {

// A socket whose other side has proved that it knows the token, and knows that we do.
struct Caller {
    Fd fd;  // non-blocking
    std::string tenant;
    std::string peer;
    std::unique_ptr<TlsStream> tls;  // null: plain
};

// Both run on the doorman's thread: serve() hands the socket to another thread and returns at once.
struct Purpose {
    // What WELCOME says after the proof; an error is told to the caller, and the connection ends.
    std::function<Result<std::vector<std::byte>>(std::string_view tenant)> welcome;
    std::function<void(Caller)> serve;
};

struct DoormanOptions {
    std::vector<std::string> addresses;  // host:port each; port 0: any that is free
    std::string token;
    Incarnation incarnation{};
    Limits limits;
    std::shared_ptr<const TlsServer> tls = nullptr;  // every caller must speak it; null: plain
    std::shared_ptr<Journal> journal = nullptr;      // of refused callers; null: they are only counted
};

struct DoormanCounters {
    std::atomic<uint64_t> accepted_total{0};
    std::atomic<uint64_t> refused_total{0};  // no descriptors left, or crowded out by later strangers
    std::atomic<uint64_t> auth_failures_total{0};
    std::atomic<uint64_t> protocol_errors_total{0};
    std::atomic<uint64_t> handshake_timeouts_total{0};
};

// An ERROR frame for a connection that is about to be closed; it is not waited for.
void send_error(int fd, Code code, const std::string& text, TlsStream* tls = nullptr);

class Doorman {
   public:
    // Listens from its return on; connections wait until start().
    static Result<std::unique_ptr<Doorman>> create(DoormanOptions options);
    ~Doorman();
    Doorman(const Doorman&) = delete;

    // Before start().
    void offer(std::string purpose, Purpose handler);
    Status start();
    // Idempotent. No handler runs after its return.
    void stop();

    // Whether its thread answers by `deadline`; any other thread.
    bool is_alive(Pulse::Clock::time_point deadline);

    const std::vector<std::string>& addresses() const { return addresses_; }  // with the real ports
    const DoormanCounters& counters() const { return counters_; }

   private:
    struct Stranger final : EventHandler {
        explicit Stranger(Doorman& owner) : doorman(owner) {}
        bool on_events(uint32_t) override { return doorman.serve(*this); }

        Doorman& doorman;
        Fd fd;
        int key = -1;  // the number of fd, which a caller that got in takes along
        Nonce nonce;
        std::string peer;
        uint64_t since_ms = 0;
        std::vector<std::byte> in;
        std::unique_ptr<TlsStream> tls;
        bool challenged = false;
        bool waits_for_room = false;  // of its socket
    };

    // A child of fork() must not keep the port in use after we are gone.
    struct Listener final : EventHandler {
        Listener(Doorman& owner, Fd socket) : doorman(owner), fd(std::move(socket)) {}
        bool on_events(uint32_t) override {
            doorman.accept_all(fd.get());
            return true;
        }

        Doorman& doorman;
        Fd fd;
        ClosedInChildren closed_in_children{fd};
    };

    explicit Doorman(DoormanOptions options) : options_(std::move(options)) {}
    void accept_all(int listener);
    void greet(Fd fd);
    bool serve(Stranger& stranger);
    void forget(const Stranger& stranger);
    // Each false: it is over with this stranger, here or for good.
    bool on_event(Stranger& stranger);
    bool secure(Stranger& stranger);
    bool challenge(Stranger& stranger);
    bool on_readable(Stranger& stranger);
    bool on_auth(Stranger& stranger, const FrameHeader& header, Reader body);
    bool refuse(Stranger& stranger, Code code, const std::string& text);
    bool refuse_plain(Stranger& stranger);
    bool hang_up(Stranger& stranger);
    void note(Level level, const char* kind, const Stranger& stranger, const std::string& text);
    void drop_late(uint64_t now_ms);
    bool is_late(Stranger& stranger, uint64_t now_ms);

    DoormanOptions options_;
    std::vector<std::string> addresses_;
    DoormanCounters counters_;
    std::map<std::string, Purpose, std::less<>> purposes_;
    std::vector<std::shared_ptr<Listener>> listeners_;
    Fd spare_;
    std::unordered_map<int, std::shared_ptr<Stranger>> strangers_;
    std::unique_ptr<EventLoop> loop_;  // null: not started
    std::atomic<bool> running_{false};
};

}  // namespace moonpool
