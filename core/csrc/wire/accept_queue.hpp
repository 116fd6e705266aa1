// AcceptQueue: accepts connections for a server that is slower than its callers, such as one in Python.
// A thread accepts all that come, and keeps some for the server to take, one of each address in turn. Where
// they are too many, the address that has most makes room with the one that waits longest: a flood of one
// address costs the server no more than it takes, and another address waits for no place.
//
//   "mp-accept": accept() --> places, by address --take()--> the server's thread
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"

namespace moonpool {

class AcceptQueue {
   public:
    // listening: a socket that listens, of IPv4 or IPv6; it becomes non-blocking.
    static Result<std::unique_ptr<AcceptQueue>> create(Fd listening, size_t places);
    ~AcceptQueue();
    AcceptQueue(const AcceptQueue&) = delete;

    Status start();
    void stop();  // idempotent; closes the listening socket's use, and all that wait

    int wake_fd() const { return wake_.get(); }  // readable while connections wait
    // Non-blocking sockets, at most so many. Any thread.
    std::vector<Fd> take(size_t most);
    uint64_t dropped_total() const { return dropped_total_; }  // connections that made room

   private:
    struct Listening final : EventHandler {
        Listening(AcceptQueue& to, Fd socket) : queue(to), fd(std::move(socket)) {}
        bool on_events(uint32_t) override {
            queue.accept_all(fd.get());
            return true;
        }
        AcceptQueue& queue;
        Fd fd;
        ClosedInChildren closed_in_children{fd};
    };

    explicit AcceptQueue(size_t places) : places_(places) {}
    void accept_all(int listening);
    void enqueue(Fd fd, std::string network);

    const size_t places_;
    std::unique_ptr<EventLoop> loop_;
    std::shared_ptr<Listening> listening_;  // until start()
    Fd wake_, spare_;                       // spare_: a descriptor to give up where the process has no other
    std::atomic<uint64_t> dropped_total_{0};
    Mutex mutex_;
    size_t waiting_ GUARDED_BY(mutex_) = 0;
    std::map<std::string, std::deque<Fd>> by_network_ GUARDED_BY(mutex_);  // none is empty
    std::string last_ GUARDED_BY(mutex_);                                  // whose turn it was
};

}  // namespace moonpool
