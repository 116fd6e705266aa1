// The half of RDMA that serves: tells initiators the keys of what is registered, and makes the queue pairs by
// which their NICs reach it. This process takes no part in transfers of peers.
//
// An initiator that gives a queue pair up may have sent on it what has not arrived. Before it repeats that
// elsewhere it has this side end the pair: after the answer nothing more of it reaches memory.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "transport/rdma/messages.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::rdma {

class Target {
   public:
    Target(const Context& context, std::vector<std::shared_ptr<Port>> ports, std::shared_ptr<Keys> keys)
        : context_(context), ports_(std::move(ports)), keys_(std::move(keys)) {}

    // On a thread that may wait.
    Result<std::vector<std::byte>> answer(const SegmentId& peer, Reader question);
    // Ends the queue pairs of an initiator that has gone; all of them.
    void leave(const SegmentId& peer);
    void close();

   private:
    using Name = std::pair<SegmentId, uint32_t>;

    Result<std::vector<std::byte>> tell_keys(Reader question) const;
    Result<std::vector<std::byte>> connect(const SegmentId& peer, Reader question);
    void end(const Name& name);

    const Context context_;
    const std::vector<std::shared_ptr<Port>> ports_;
    const std::shared_ptr<Keys> keys_;
    Mutex mutex_;
    bool closed_ GUARDED_BY(mutex_) = false;
    std::map<Name, std::unique_ptr<QueuePair>> pairs_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::transport::rdma
