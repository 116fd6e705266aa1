// Relay: the proxy's data plane: one thread with one epoll that serves all clients and all engines.
//
// A turn: what the sockets have is read and handed on; then all requests that became whole are put to the
// decider together (one visit to Python for all of them), and its plans are carried out. Whatever ended in a
// turn is destroyed after it. Only what says so may be called from other threads.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "json/scanner.hpp"
#include "relay/access_log.hpp"
#include "relay/addresses.hpp"
#include "relay/api_keys.hpp"
#include "relay/client.hpp"
#include "relay/engine.hpp"
#include "relay/examiner.hpp"
#include "relay/exchange.hpp"
#include "relay/idle_list.hpp"
#include "relay/observations.hpp"
#include "relay/poller.hpp"
#include "relay/request.hpp"
#include "relay/routes.hpp"
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
    uint32_t in_flight(size_t place) const { return statuses_[place].in_flight; }
    double rests_until(size_t place) const { return statuses_[place].rests_until; }
    void engine_state(size_t place, bool healthy);
    void engine_late(size_t place);  // it has not answered a health check in time
    void engine_address(size_t place, const sockaddr_storage& address, socklen_t size);
    void engine_models(size_t place, std::optional<std::vector<std::string>> models);
    // patience_s: as in Engine.
    void engine_role(size_t place, Role role, double patience_s);
    void resume(uint64_t request, Decision decision);
    bool drain(double timeout_s);  // accept no more, finish what runs; whether all did
    void close();                  // end everything now; idempotent
    void advance_clock_for_test(double seconds);     // for tests: so much time has passed
    double clock() const;
    // Run something on the relay's thread and wait for it; here, when that is this thread or it has ended.
    void call(const std::function<void()>& function);
    bool is_this_thread() const { return thread_.is_this(); }

    // On the relay's thread: what its parts use.
    const Settings settings;
    double now = 0;  // of this turn
    Poller poller;
    std::vector<char> scratch = std::vector<char>(256 << 10);
    json::Object scratch_object;
    std::vector<std::unique_ptr<Engine>> engines;  // by place; nullptr: it is free
    std::vector<Client*> ready;                    // clients that may go on
    // Bytes of bodies. Those for the proxy's own pages, for which no client is asked for a key here, come out
    // of a small purse of their own.
    struct Purse {
        size_t held = 0, most = 0;
    };
    Purse bodies, page_bodies;
    size_t unread_bytes = 0;  // what all clients have not taken yet, and what was read ahead of them
    Addresses addresses;
    IdleList strangers,
        idle;  // connections that can be closed; that have not, that have had a request served
    bool draining = false;
    std::unique_ptr<AccessLog> access_log;
    Observations observations;
    uint64_t accepted = 0;
    std::map<std::string, uint64_t, std::less<>> rejected;
    // What clients may not say and was left out: members of bodies, fields of heads, ids.
    std::array<uint64_t, 3> reserved{};
    const Routes routes;
    const std::vector<std::unique_ptr<Client>>& clients() const { return clients_; }

    void accept(int fd, const sockaddr_storage& peer);
    void defer_delete(Client& client);
    void defer_delete(Engine& engine, Upstream& upstream);
    Upstream& new_upstream(Engine& engine);
    void drop_idle(Engine& engine);
    std::shared_ptr<Request> new_request();
    void give_back(std::shared_ptr<Request>&& request);
    Exchange* take_exchange();
    void give_back(Exchange* exchange);
    void adopt(Request& request);
    bool key_fits(const Request& request) const;
    bool models_known() const { return models_known_; }
    size_t engine_count() const;                     // those that are leaving left out
    uint64_t removals() const { return removals_; }  // of engines, so far
    bool are_there(const Plan& plan) const;
    void not_wanted(uint64_t request, const Decision& decision);
    bool candidates(Request& request, const std::vector<uint16_t>& tried, std::vector<uint16_t>& out);
    // Beside this thread; then exchange.examined() is called, unless it was forgotten.
    void examine(Exchange& exchange, std::shared_ptr<Request> request);
    void ask(Exchange& exchange, Question question);
    void forget(Exchange& exchange);
    void engine_refused(Engine& engine);
    void write_request_head(std::string& out, Request& request, const Engine& engine, size_t body_bytes,
                            const Plan* prefill) const;
    void count_rejected(std::string_view reason);
    int retry_after() const;
    const std::vector<std::string>& engine_names() const { return engine_names_; }
    bool check_integrity() const;  // whether all invariants hold

   private:
    Relay(Settings settings, Decider& decider);
    void post(std::function<void()> function);
    void run();
    void run_posted();
    void decide();
    void sweep();
    void sweep_engine(Engine& engine);
    void sweep_leaving(Engine& engine);
    Engine* staying(size_t place) const;
    void look_at_models();
    void clean();
    void stop_listening();
    void end_all();
    void look_whether_empty();
    uint64_t random();
    void shed();
    bool close_idle(const Client& newcomer, const uint64_t* of_address);

    class Wake final : public Socket {
       public:
        void on_events(uint32_t) override;
    };

    Decider& decider_;
    ApiKeys keys_;
    std::vector<std::string> engine_names_;
    std::unique_ptr<EngineStatus[]> statuses_;  // by place
    uint64_t removals_ = 0;
    bool models_known_ = false;
    uint64_t next_id_ = 1;
    std::array<uint64_t, 2> random_{};

    std::vector<std::unique_ptr<Listener>> listeners_;
    std::vector<std::unique_ptr<Client>> clients_;  // each knows its index
    std::vector<std::unique_ptr<Socket>> retired_;
    std::vector<std::unique_ptr<Engine>> retired_engines_;
    std::vector<std::shared_ptr<Request>> spent_requests_, spare_requests_;
    std::vector<std::unique_ptr<Exchange>> exchanges_;
    std::vector<Exchange*> spent_exchanges_, spare_exchanges_;

    std::vector<Question> questions_;
    std::vector<Exchange*> asking_, applying_;  // nullptr: forgotten
    std::unordered_map<uint64_t, Exchange*> later_, examining_;

    Wake wake_;
    std::atomic<int64_t> advanced_ns_{0};
    std::mutex mutex_;
    std::condition_variable emptied_;
    std::vector<std::function<void()>> posted_;
    bool ended_ = false, empty_ = false;
    std::atomic<bool> stopping_{false};
    Examiner examiner_;
    ServiceThread thread_;
};

}  // namespace moonpool::relay
