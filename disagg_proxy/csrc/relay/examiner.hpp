// Examiner: reads large bodies beside the relay's thread, for which all sockets wait, and gives their memory
// back, which takes the kernel milliseconds. One thread, one body at a time, in the order in which they came;
// started with the first. A request that is gone is passed over.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/mutex.hpp"
#include "http/refusal.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class Examiner {
   public:
    using Refusal = std::optional<http::Refusal>;
    // On the examiner's thread. The request is given back with it, so that the examiner holds it no longer.
    using Then = std::function<void(std::shared_ptr<Request>, Refusal)>;

    explicit Examiner(const BodyLimits& limits) : limits_(limits) {}
    ~Examiner() { close(); }
    Examiner(const Examiner&) = delete;

    // On the relay's thread, which leaves the request alone until `then`.
    void add(std::shared_ptr<Request> request, bool form, Then then);
    // Frees it beside the caller's thread.
    void free(std::string body);
    // Ends the thread; those that wait are dropped.
    void close();

   private:
    struct Job {
        std::shared_ptr<Request> request;  // nullptr: `body` is to be freed
        bool form = false;
        Then then;
        std::string body;
    };
    void put(Job job);
    void run();

    const BodyLimits limits_;
    Mutex mutex_;
    CondVar some_;
    std::deque<Job> jobs_ GUARDED_BY(mutex_);
    bool closed_ GUARDED_BY(mutex_) = false;
    std::thread thread_;
};

}  // namespace moonpool::relay
