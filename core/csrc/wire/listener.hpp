// Listener: the one listening TCP port of a process, whatever the process serves: a node's store, a transfer
// engine, a master. It sends the challenge, waits for the proof, answers it, and hands the socket to the
// service that the caller asked for. It reads nothing but the handshake, and parses nothing else before the
// proof. With `tls` nothing is said in plain but the reason why a caller that does not speak TLS is refused.
//
// One thread. Connections without proof have 5 s and at most 64 places. The address that has the most of them
// makes room with the one that waits longest, so that idle connections keep no caller out, and a flood of one
// address ends no handshake of another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
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
#include "wire/secrets.hpp"
#include "wire/tenant_keys.hpp"
#include "wire/tls.hpp"

namespace moonpool {

// A socket whose other side has proved that it knows the token, or the tenant's own key, and knows that we
// do.
struct AuthenticatedConnection {
    Fd fd;  // non-blocking
    std::string tenant;
    std::string peer;
    std::unique_ptr<TlsStream> tls;  // null: plain
    Access access{};
    uint16_t version = kVersion;  // of the wire format, the highest that both sides speak
};

// All run on the listener's thread: serve() hands the socket to another thread and returns at once.
struct Service {
    // What WELCOME says after the proof; an error is told to the caller, and the connection ends.
    std::function<Result<std::vector<std::byte>>(std::string_view tenant)> welcome;
    std::function<void(AuthenticatedConnection)> serve;
    // The same of a caller that proved a key of the tenant; null: such a key does not open this service.
    std::function<Result<std::vector<std::byte>>(std::string_view tenant, const Access&)> welcome_tenant =
        nullptr;
    // host:port of the process that serves in this one's place; a refusal (kUnavailable) names it. Empty, or
    // null: none is known.
    std::function<std::string()> instead = nullptr;
};

struct ListenerOptions {
    std::vector<std::string> addresses;  // host:port each; port 0: any that is free
    Secrets token;
    Incarnation incarnation{};
    Limits limits;
    std::shared_ptr<const TlsServer> tls = nullptr;       // every caller must speak it; null: plain
    std::shared_ptr<Journal> journal = nullptr;           // of refused callers; null: they are only counted
    std::shared_ptr<const TenantKeys> tenants = nullptr;  // null: the cluster token alone opens the services
    std::vector<Fd> sockets{};  // that listen at the addresses already, in their order; none: new ones
    VersionRange versions = kWireVersions;  // of the wire format, that are spoken here
};

struct ListenerCounters {
    std::atomic<uint64_t> accepted_total{0};
    std::atomic<uint64_t> refused_total{0};  // no descriptors left, or crowded out by later connections
    std::atomic<uint64_t> auth_failures_total{0};
    std::atomic<uint64_t> protocol_errors_total{0};
    std::atomic<uint64_t> handshake_timeouts_total{0};
};

// An ERROR frame for a connection that is about to be closed; it is not waited for.
void send_error(int fd, Code code, const std::string& text, TlsStream* tls = nullptr);

class Listener {
   public:
    // Listens from its return on; connections wait until start().
    static Result<std::unique_ptr<Listener>> create(ListenerOptions options);
    ~Listener();
    Listener(const Listener&) = delete;

    // Before start().
    void offer(std::string service, Service handler);
    // paused: takes no connection until resume().
    Status start(bool paused = false);
    // Idempotent. No handler runs after its return.
    void stop();

    // Takes no new connection until resume(), and waits at most so long for those in the handshake.
    void pause(uint32_t timeout_ms);
    void resume();
    // That listen, for another process to take over.
    std::vector<int> sockets() const;

    // Whether its thread answers by `deadline`; any other thread.
    bool is_alive(LivenessProbe::Clock::time_point deadline);

    const std::vector<std::string>& addresses() const { return addresses_; }  // with the real ports
    const ListenerCounters& counters() const { return counters_; }

   private:
    // How many places each address has; of IPv6 each /64.
    using Callers = std::map<std::string, size_t, std::less<>>;

    struct PendingConnection final : EventHandler {
        explicit PendingConnection(Listener& owner) : listener(owner) {}
        bool on_events(uint32_t) override { return listener.serve(*this); }

        Listener& listener;
        Fd fd;
        int key = -1;  // the number of fd, which a caller that got in takes along
        Nonce nonce;
        std::string peer;
        Callers::iterator caller;
        uint64_t since_ms = 0;
        std::vector<std::byte> in;
        std::unique_ptr<TlsStream> tls;
        bool challenged = false;
        bool waits_for_room = false;  // of its socket
    };

    // A child of fork() must not keep the port in use after we are gone.
    struct ListenSocket final : EventHandler {
        ListenSocket(Listener& owner, Fd socket) : listener(owner), fd(std::move(socket)) {}
        bool on_events(uint32_t) override {
            listener.accept_all(fd.get());
            return true;
        }

        Listener& listener;
        Fd fd;
        ClosedInChildren closed_in_children{fd};
    };

    explicit Listener(ListenerOptions options) : options_(std::move(options)) {}
    void accept_all(int socket);
    void greet(Fd fd);
    void make_room();
    bool serve(PendingConnection& pending);
    void forget(const PendingConnection& pending);
    // Each false: it is over with this connection, here or for good.
    bool on_event(PendingConnection& pending);
    bool secure(PendingConnection& pending);
    bool challenge(PendingConnection& pending);
    bool on_readable(PendingConnection& pending);
    Speaker own() const { return {"this process", options_.versions}; }
    // Behind agree_on_auth(): the version of the header is the one that both sides take.
    bool on_auth(PendingConnection& pending, const FrameHeader& header, Reader body);
    bool refuse(PendingConnection& pending, Code code, const std::string& text, const std::string& noted = {},
                std::span<const std::byte> behind = {});
    bool refuse_plain(PendingConnection& pending);
    bool hang_up(PendingConnection& pending);
    void note(Level level, const char* kind, const PendingConnection& pending, const std::string& text);
    void drop_late(uint64_t now_ms);
    bool is_late(PendingConnection& pending, uint64_t now_ms);

    ListenerOptions options_;
    std::vector<std::string> addresses_;
    ListenerCounters counters_;
    std::map<std::string, Service, std::less<>> services_;
    std::vector<std::shared_ptr<ListenSocket>> sockets_;
    Fd spare_;
    std::unordered_map<int, std::shared_ptr<PendingConnection>> pending_;
    Callers callers_;
    std::unique_ptr<EventLoop> loop_;  // null: not started
    std::atomic<bool> running_{false};
};

}  // namespace moonpool
