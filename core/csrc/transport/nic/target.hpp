// The half that serves of a transport by NICs: tells initiators the keys of what is registered, and makes the
// ends of the connections by which they reach it. This process takes no part in transfers of peers, but where
// a provider of libfabric works in software.
//
// An initiator that gives a connection up may have sent on it what has not arrived. Before it repeats that
// elsewhere it has this side end its end: after the answer nothing more of it reaches memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "transport/nic/messages.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::nic {

// This side of a connection that a peer uses. Once destroyed, nothing of the peer reaches memory by it.
class TargetEnd {
   public:
    virtual ~TargetEnd() = default;
};

class Target {
   public:
    // Makes the end at that port of ours for an initiator; `question` and `answer` have the transport's form.
    // Any thread that may wait for this host.
    using Make =
        std::function<Result<std::unique_ptr<TargetEnd>>(uint8_t port, Reader question, Writer& answer)>;

    Target(const Context& context, std::shared_ptr<Keys> keys, KeySize key_size, Make make)
        : context_(context), keys_(std::move(keys)), key_size_(key_size), make_(std::move(make)) {}

    // On a thread that may wait.
    Result<std::vector<std::byte>> answer(const SegmentId& peer, Reader question);
    // Ends the connections of an initiator that has gone; of those that were told keys of that region, whose
    // keys have ended; all of them.
    void leave(const SegmentId& peer);
    void leave_region(uint64_t region_id);
    void close();

   private:
    using Name = std::pair<SegmentId, uint32_t>;

    Result<std::vector<std::byte>> tell_keys(const SegmentId& peer, Reader question);
    Result<std::vector<std::byte>> connect(const SegmentId& peer, Reader question);
    void end(const Name& name);

    const Context context_;
    const std::shared_ptr<Keys> keys_;
    const KeySize key_size_;
    const Make make_;
    Mutex mutex_;
    bool closed_ GUARDED_BY(mutex_) = false;
    std::map<Name, std::unique_ptr<TargetEnd>> ends_ GUARDED_BY(mutex_);
    std::map<SegmentId, std::set<uint64_t>> told_ GUARDED_BY(mutex_);  // regions
};

}  // namespace moonpool::transport::nic
