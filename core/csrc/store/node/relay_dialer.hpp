// RelayDialer: connects to the master that serves, for as long as it takes, on a thread of its own, and
// pauses after a failure, longer after each.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "directory/master_addresses.hpp"
#include "wire/dial.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

struct RelayDialerOptions {
    std::string master;  // "host:port", or several with commas between
    Range range{};       // of the shards, that they have
    Secrets token;
    std::string tenant;
    std::string interface;
    std::shared_ptr<const TlsClient> tls;  // null: plain
    int timeout_ms = 500;                  // of one attempt at one address
    int backoff_first_ms = 50;             // pause after a failed attempt; it doubles,
    int backoff_longest_ms = 500;          // up to this
};

class RelayDialer {
   public:
    using Done = std::function<void(std::shared_ptr<Result<Dialed>>)>;
    RelayDialer(RelayDialerOptions options, Done done)
        : options_(std::move(options)), addresses_(options_.master, options_.range), done_(std::move(done)) {}
    ~RelayDialer() { stop(); }
    RelayDialer(const RelayDialer&) = delete;

    // Until there is a connection; then it is to be called again.
    Status want() {
        if (!thread_.started()) {
            if (Status status = thread_.start("mp-relay-dial", [this] { run(); }); !status) return status;
        }
        MutexLock lock(waiting_->mutex);
        waiting_->wanted = true;
        waiting_->wake.notify_all();
        return success();
    }

    // Of the master that was dialed last. Any thread.
    void hear(const MasterList& list) { addresses_.hear(list); }
    MasterList as_configured(const MasterList& list) const { return addresses_.as_configured(list); }

    void stop() {
        given_up_ = true;
        // In a child of fork() the mutex may be held for ever, and destroying the condition variable waits.
        if (fork_.in_child()) {
            (void)waiting_.release();
        } else if (waiting_ != nullptr) {
            MutexLock lock(waiting_->mutex);
            waiting_->wake.notify_all();
        }
        (void)thread_.join();
    }

   private:
    void run() {
        int backoff_ms = options_.backoff_first_ms;
        MutexLock lock(waiting_->mutex);
        while (!given_up_) {
            waiting_->wake.wait(lock,
                                [&]() REQUIRES(waiting_->mutex) { return given_up_ || waiting_->wanted; });
            if (given_up_) return;
            lock.unlock();
            DialOptions to;
            to.token = options_.token;
            to.tenant = options_.tenant;
            to.service = kServiceDirectory;
            to.timeout_ms = options_.timeout_ms;
            to.interface = options_.interface;
            to.given_up = &given_up_;
            to.tls = options_.tls;
            auto dialed = std::make_shared<Result<Dialed>>(addresses_.dial(std::move(to)));
            const bool ok = dialed->ok();
            lock.lock();
            if (ok) waiting_->wanted = false;
            lock.unlock();
            done_(std::move(dialed));
            lock.lock();
            if (ok) {
                backoff_ms = options_.backoff_first_ms;
                continue;
            }
            waiting_->wake.wait_for(lock, std::chrono::milliseconds(backoff_ms),
                                    [this] { return given_up_.load(); });
            backoff_ms = std::min(backoff_ms * 2, options_.backoff_longest_ms);
        }
    }

    const RelayDialerOptions options_;
    MasterAddresses addresses_;
    Done done_;
    ForkGuard fork_;
    std::atomic<bool> given_up_{false};
    struct Waiting {
        Mutex mutex;
        CondVar wake;
        bool wanted GUARDED_BY(mutex) = false;
    };
    std::unique_ptr<Waiting> waiting_ = std::make_unique<Waiting>();
    ServiceThread thread_;
};

}  // namespace moonpool
