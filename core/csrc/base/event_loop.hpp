// EventLoop: one thread with an epoll. Handlers belong to it: added, called and destroyed on its thread only;
// every other thread posts. Nothing that runs here may block on a peer.
//
//   post() --> posted functions --.
//   epoll  --> on_events() --------+--> one thread --> every tick_ms: on_tick() of the owner and each handler
//
// In a child of fork() the loop is the parent's: post() and call() refuse, stop() leaves all as it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/liveness_probe.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"

namespace moonpool {

class EventHandler {
   public:
    virtual ~EventHandler() = default;
    // False: the loop takes the handler out and destroys it. Events are those of epoll.
    virtual bool on_events(uint32_t events) = 0;
    virtual bool on_tick(uint64_t now_ms) {
        (void)now_ms;
        return true;
    }
    // Whether more is likely to come within microseconds of what came last: an answered caller calls again;
    // the next bytes of a stream rather gather while the loop sleeps.
    virtual bool expects_more() const { return true; }
};

struct EventLoopOptions {
    const char* name = "mp-loop";  // of the thread, at most 15 characters
    uint32_t tick_ms = 50;
    std::function<void(uint64_t now_ms)> on_tick = nullptr;  // on the loop, before the handlers'
    // Of so many ticks each handler has one: where there are many, whose deadlines are seconds.
    uint32_t ticks_per_handler = 1;
    // Whether no tick is due before the next event. Null: while there is no handler.
    std::function<bool()> idle = nullptr;
    // After an event the loop polls for so long before it sleeps: waking a sleeping thread on another core
    // costs 20-50 us in a virtual machine, more than a small request. An idle loop costs nothing.
    uint32_t spin_us = 0;
    // But not after bytes that were sent from this very core (over a real network: whose interrupt this core
    // took): then polling keeps the peer from it, and the kernel switches to whom it wakes for less.
    bool spins_beside_sender = true;
};

class EventLoop {
   public:
    // Functions may be posted from its return on; they run once the loop does.
    static Result<std::unique_ptr<EventLoop>> create(EventLoopOptions options);
    ~EventLoop();
    EventLoop(const EventLoop&) = delete;

    // Idempotent; a loop that was stopped starts again, without the handlers that it had.
    Status start();
    // Idempotent; no handler and no posted function runs after its return. What was posted is still run.
    // False in a child of fork().
    bool stop();

    // False when the loop has stopped; the function is then destroyed uncalled.
    bool post(std::function<void()> function) EXCLUDES(mutex_);
    // Runs it on the loop and waits, any other thread. False: the loop has stopped, or did not come to it in
    // time; then it may still run later, so that it must own what it uses.
    bool call(std::function<void()> function, uint32_t timeout_ms);
    // Whether the loop comes to its next turn by `deadline`; any other thread.
    bool is_alive(LivenessProbe::Clock::time_point deadline);

    // On the loop's thread, or before start().
    bool add(int fd, uint32_t events, std::shared_ptr<EventHandler> handler);
    void watch(int fd, uint32_t events);
    std::shared_ptr<EventHandler> remove(int fd);

   private:
    explicit EventLoop(EventLoopOptions options) : options_(std::move(options)) {}
    void run();
    void run_posted();
    void tick();
    void drop(int fd, const std::shared_ptr<EventHandler>& handler);

    EventLoopOptions options_;
    uint32_t ticks_ = 0;
    ForkGuard fork_;
    Fd epoll_, wake_;
    ClosedInChildren epoll_closed_{epoll_};
    Mutex mutex_;
    std::vector<std::function<void()>> posted_ GUARDED_BY(mutex_);
    bool stopped_ GUARDED_BY(mutex_) = false;
    std::atomic<bool> stopping_{false};
    std::unordered_map<int, std::shared_ptr<EventHandler>> handlers_;
    LivenessProbe probe_;
    ServiceThread thread_;
};

}  // namespace moonpool
