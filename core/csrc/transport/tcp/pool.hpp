// Pool: the connections to one peer. A caller has one alone; at most `connections_max` are open. What
// was written on a connection that was given up is fenced before another is used, so that a late byte never
// overwrites a newer one.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/identity.hpp"
#include "transport/tcp/channel.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

struct PoolOptions {
    DialOptions dial;
    SegmentId self{};
    std::string self_name;
    SegmentId peer{};
    uint32_t connections_max = 2;
    uint64_t frame_bytes = kFrameBytes;
};

class Pool {
   public:
    Pool(PoolOptions options, Counters& counters) : options_(std::move(options)), counters_(counters) {}

    // One that is idle, or a new one; waits when all are in use. `fresh`: idle ones are not to be trusted.
    Result<std::unique_ptr<Channel>> acquire(bool fresh, int timeout_ms);
    // Only when one is idle.
    std::unique_ptr<Channel> try_acquire();
    void give_back(std::unique_ptr<Channel> channel);
    void give_up(std::unique_ptr<Channel> channel);

    // The first connection was made by the handshake of the engine.
    Status adopt(Dialed dialed, int timeout_ms);

    bool fenced();  // no connection was given up whose writes may still arrive
    size_t open();
    bool full();   // every connection there may be is in use
    void close();  // ends what is idle, refuses everything later
    const std::atomic<bool>* closed() const { return &closed_; }

   private:
    Result<std::unique_ptr<Channel>> dial(int timeout_ms);
    Result<std::unique_ptr<Channel>> greet(Dialed dialed, int timeout_ms, const std::atomic<bool>* given_up);
    Status send_fences(Channel& channel, int timeout_ms);

    PoolOptions options_;
    Counters& counters_;
    Mutex mutex_;
    CondVar returned_;
    std::vector<std::unique_ptr<Channel>> idle_ GUARDED_BY(mutex_);
    uint32_t open_ GUARDED_BY(mutex_) = 0;
    std::vector<uint32_t> fences_ GUARDED_BY(mutex_);  // channels given up whose writes may still arrive
    std::atomic<bool> closed_{false};                  // set under the mutex, but seen by a thread that dials
    uint64_t unreachable_until_ns_ GUARDED_BY(mutex_) = 0;
    Error unreachable_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::transport::tcp
