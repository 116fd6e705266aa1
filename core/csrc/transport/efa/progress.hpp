// Progress: the thread of an engine that polls libfabric where no caller does. Providers that work in
// software, `efa` among them for some requests, carry a request on only while both sides poll.
//
// While requests of this engine are under way it looks ten thousand times a second; else it sleeps until a
// provider says that something has come, or, where the provider cannot, for at most 1 ms while peers may ask.
// Without peers it sleeps.
#pragma once

#include <poll.h>

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "base/service_thread.hpp"
#include "transport/efa/endpoint.hpp"

namespace moonpool::transport::efa {

// The endpoints of a domain that serve, each one initiator.
class Server {
   public:
    explicit Server(std::shared_ptr<Domain> d) : domain(std::move(d)) {}

    void add(Endpoint* endpoint);
    // It is not polled behind it.
    void remove(Endpoint* endpoint);
    // Polls them. Appends their descriptors, of which one is readable when it is to be called again; whether
    // all have one.
    bool poll(std::vector<pollfd>& fds);

    const std::shared_ptr<Domain> domain;

   private:
    Mutex mutex_;
    std::vector<Endpoint*> endpoints_ GUARDED_BY(mutex_);
};

class Progress {
   public:
    static Result<std::shared_ptr<Progress>> start(std::vector<std::shared_ptr<Server>> servers);
    ~Progress() { stop(); }
    Progress(const Progress&) = delete;

    // Tells it of what may have completed behind each wake(), and ten times a second of the time, until it
    // says that it is over.
    void watch(std::shared_ptr<EventHandler> watcher);
    // Requests are under way. To be repeated at each event while it is so.
    void wake();
    // A peer may ask from now on.
    void wake_once();
    // Idempotent; not on its own thread.
    void stop();

   private:
    explicit Progress(std::vector<std::shared_ptr<Server>> servers) : servers_(std::move(servers)) {}
    void run();
    void tell(bool events, bool tick);

    const std::vector<std::shared_ptr<Server>> servers_;
    Fd wake_;
    std::atomic<bool> under_way_{false}, stopping_{false};
    Mutex mutex_;
    std::list<std::shared_ptr<EventHandler>> watchers_ GUARDED_BY(mutex_);
    ServiceThread thread_;
};

}  // namespace moonpool::transport::efa
