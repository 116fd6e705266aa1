// Server: what an engine serves to initiators of its own host: an abstract Unix socket, on which they prove
// themselves and ask. Afterwards they touch the memory without us; the gates take it back. Transports of one
// host have one each.
//
// A name in the abstract namespace is reachable from this network namespace only, the kernel names the user,
// and the cookie came over an authenticated connection of this tenant: so no other host, user or tenant gets
// in.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/host/gate.hpp"
#include "transport/transport.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::host {

inline constexpr size_t kSessionsMax = 1024;

// The sockaddr of a name in the abstract namespace; its length.
socklen_t abstract_address(const std::string& name, sockaddr_un& address);

// What goes with an answer.
struct Passed {
    int fd = -1;                  // a descriptor, -1: none
    std::shared_ptr<void> owner;  // of the descriptor, until it was sent
};

class Server {
   public:
    // Answers a question of an initiator that has proved itself, on an I/O thread: appends the answer's body.
    // An error is told to the initiator; kProtocol ends its session.
    using Answer = std::function<Result<Passed>(Kind kind, Reader question, Writer& answer)>;

    // name: the socket's, before the segment. outlives_socket: an initiator may be inside its gate when its
    // socket has closed, because a device works for it.
    Server(const Context& context, const std::string& name, bool outlives_socket, Answer answer);
    ~Server();

    // Listens on socket().
    Status start();
    const std::string& socket() const { return socket_; }  // a name in the abstract namespace
    const std::array<uint8_t, 32>& cookie() const { return cookie_; }

    // From now on no initiator enters with an older list of regions; true once none is inside any more.
    uint64_t revoke();
    bool drained(uint64_t generation);
    void close();  // every initiator finds its gate closed

    // As Transport. An initiator that does not name itself may be any: its gate is closed as well.
    void shut_out(const SegmentId& segment);
    bool is_out(const SegmentId& segment);

    // Read before the list of regions: one that is newer than it is only asked for once more.
    uint64_t generation();

   private:
    class Listener;
    class Session;
    friend class Session;
    struct Entry {
        std::shared_ptr<Gate> gate;
        SegmentId initiator{};  // zeros: one of an older version, which does not say it
        Fd process;             // of the initiator, where it may be inside without a socket
        bool left = false;      // its socket has closed
    };

    static bool may_be(const Entry& entry, const SegmentId& segment) {
        return entry.initiator == segment || entry.initiator == SegmentId{};
    }

    void drop_ended() REQUIRES(mutex_);

    // The gates, which the I/O thread opens and a thread that deregisters walks.
    Mutex mutex_;
    uint64_t generation_ GUARDED_BY(mutex_) = 1;
    std::map<uint64_t, Entry> gates_ GUARDED_BY(mutex_);
    uint64_t next_session_ GUARDED_BY(mutex_) = 1;

    const Context context_;
    EventLoop& loop_;
    const bool outlives_socket_;
    const Answer answer_;
    std::string socket_;
    std::array<uint8_t, 32> cookie_;
};

}  // namespace moonpool::transport::host
