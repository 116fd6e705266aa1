// The half of shared memory that serves: an abstract Unix socket, on which initiators of this host prove
// themselves and are handed descriptors. Afterwards they touch the memory without us; the gates take it back.
//
// A name in the abstract namespace is reachable from this network namespace only, the kernel names the user,
// and the cookie came over an authenticated connection of this tenant: so no other host, user or tenant gets
// in.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/shm/gate.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::shm {

inline constexpr size_t kSessionsMax = 1024;

class Target {
   public:
    explicit Target(const Context& context);
    ~Target();

    // Listens on socket().
    Status start();
    const std::string& socket() const { return socket_; }  // a name in the abstract namespace
    const std::array<uint8_t, 32>& cookie() const { return cookie_; }

    // From now on no initiator enters with an older list of regions; true once none is inside any more.
    uint64_t revoke();
    bool drained(uint64_t generation);
    void close();  // every initiator finds its gate closed

   private:
    class Listener;
    class Session;
    friend class Session;

    // The gates, which the I/O thread opens and a thread that deregisters walks.
    Mutex mutex_;
    uint64_t generation_ GUARDED_BY(mutex_) = 1;
    std::map<uint64_t, std::shared_ptr<Gate>> gates_ GUARDED_BY(mutex_);
    uint64_t next_session_ GUARDED_BY(mutex_) = 1;

    const Context context_;
    EventLoop& loop_;
    std::string socket_;
    std::array<uint8_t, 32> cookie_;
};

}  // namespace moonpool::transport::shm
