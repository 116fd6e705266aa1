// Loop: one I/O thread with an epoll. Handlers belong to it: added, called and destroyed on its thread only;
// everybody else posts. Nothing that runs here may block on a peer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/result.hpp"

namespace moonpool::transport {

class Handler {
   public:
    virtual ~Handler() = default;
    // False: take me out and destroy me. Events are those of epoll.
    virtual bool on_events(uint32_t events) = 0;
    virtual bool on_tick(uint64_t now_ms) {
        (void)now_ms;
        return true;
    }
};

class Loop {
   public:
    static Result<std::unique_ptr<Loop>> start(const char* name);
    ~Loop();
    Loop(const Loop&) = delete;

    // False when the loop has stopped; the function is then destroyed uncalled.
    bool post(std::function<void()> function);
    // Idempotent; no handler and no posted function runs after its return. What was posted is still run.
    void stop();

    // On the loop's thread.
    bool add(int fd, uint32_t events, std::shared_ptr<Handler> handler);
    void watch(int fd, uint32_t events);
    std::shared_ptr<Handler> remove(int fd);

   private:
    Loop() = default;
    void run();
    void run_posted();
    void tick();
    void drop(int fd, const std::shared_ptr<Handler>& handler);

    ForkGuard fork_;
    Fd epoll_, wake_;
    ClosedInChildren epoll_closed_{epoll_};
    std::mutex mutex_;
    std::vector<std::function<void()>> posted_;
    bool stopped_ = false;
    std::atomic<bool> stopping_{false};
    std::unordered_map<int, std::shared_ptr<Handler>> handlers_;
    std::thread thread_;
};

}  // namespace moonpool::transport
