// Relay: the proxy's data plane: one thread with one epoll that serves all clients and all engines.
//
// A turn: what the sockets have is read and handed on; then all requests that became whole are put to the
// decider together (one visit to Python for all of them), and its plans are carried out. Whatever ended in a
// turn is destroyed after it. Only what says so may be called from other threads.
//
//     Relay: the thread and its turns      RelayContext: what all parts work with
//       Listener -> ClientTable: Client -> Exchange -> Leg -> EngineTable: Engine: Upstream
//                                             '-----> DecisionQueue -> Decider
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "relay/client_table.hpp"
#include "relay/context.hpp"
#include "relay/decision_queue.hpp"
#include "relay/engine_table.hpp"
#include "relay/examiner.hpp"
#include "relay/pools.hpp"
#include "relay/request.hpp"
#include "relay/settings.hpp"

namespace moonpool::relay {

class Listener;

class Relay {
   public:
    static Result<std::unique_ptr<Relay>> start(Settings settings, Decider& decider);
    ~Relay();
    Relay(const Relay&) = delete;

    // From any thread.
    void listen(int fd);  // takes the descriptor of a listening socket
    // At a place that is free, below Settings::engines_max.
    void add_engine(size_t place, EngineSettings engine);
    // No request goes there any more; those that are there have drain_s to end. Then the decider hears that
    // the engine is gone.
    void remove_engine(size_t place, double drain_s);
    uint32_t in_flight(size_t place) const { return engines_.status(place).in_flight; }
    double rests_until(size_t place) const { return engines_.status(place).rests_until; }
    void engine_state(size_t place, bool healthy);
    void engine_late(size_t place);  // it has not answered a health check in time
    void engine_address(size_t place, const sockaddr_storage& address, socklen_t size);
    void engine_models(size_t place, std::optional<std::vector<std::string>> models);
    // patience_s: as in Engine.
    void engine_role(size_t place, Role role, double patience_s);
    // For all requests whose head comes from now on. None: no client is asked for one.
    void set_api_keys(std::vector<ApiKey> keys);
    Status reopen_access_log();  // AccessLog::reopen(), where there is one
    void resume(uint64_t request, Decision decision);
    std::string take_observations() { return context_.observations.take(); }
    bool drain(double timeout_s);  // accept no more, finish what runs; whether all did
    void close();                  // end everything now; idempotent
    void advance_clock_for_test(double seconds);
    double clock() const;  // s
    // Run something on the relay's thread and wait for it; here, when that is this thread or it has ended.
    void call(const std::function<void()>& function);
    bool is_this_thread() const { return thread_.is_this(); }

    // On the relay's thread: to look at.
    const RelayContext& context() const { return context_; }
    const EngineTable& engines() const { return engines_; }
    const ClientTable& clients() const { return clients_; }
    bool check_integrity() const;  // whether all invariants hold

   private:
    Relay(Settings settings, Decider& decider);
    void post(std::function<void()> function);
    void post_to(size_t place, std::function<void(Engine&)> function);
    void wake();
    void run();
    void run_posted();
    void sweep();
    void clean();
    void stop_listening();
    void end_all();
    void look_whether_empty();

    class Wake final : public Socket {
       public:
        void on_events(uint32_t) override;
    };

    Decider& decider_;
    RelayContext context_;
    Examiner examiner_;
    EngineTable engines_;
    DecisionQueue decisions_;
    RequestPool requests_;
    ExchangePool exchanges_;
    ClientTable clients_;
    std::vector<std::unique_ptr<Listener>> listeners_;

    Wake wake_;
    std::atomic<int64_t> advanced_ns_{0};
    Mutex mutex_;
    CondVar emptied_;
    std::vector<std::function<void()>> posted_ GUARDED_BY(mutex_);
    bool ended_ GUARDED_BY(mutex_) = false, empty_ GUARDED_BY(mutex_) = false;
    std::atomic<bool> stopping_{false};
    ServiceThread thread_;
};

}  // namespace moonpool::relay
