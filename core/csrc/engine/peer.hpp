// Peer: an opened segment: its identity, and the links to it, in the order in which they are tried. What one
// link leaves waiting goes to the next, within the same transfer.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "transport/frames.hpp"
#include "transport/tcp/link.hpp"
#include "transport/transport.hpp"
#include "transport/workers.hpp"

namespace moonpool::engine {

// What became of one peer's share.
struct Outcome {
    Status status = success();              // of the paths; a refused slice is in the job
    const transport::Link* last = nullptr;  // that was tried; the peer's
};

class Peer : public std::enable_shared_from_this<Peer> {
   public:
    Peer(transport::PeerInfo info, std::shared_ptr<transport::tcp::Link> control,
         std::vector<std::shared_ptr<transport::Link>> links, transport::Counters& counters)
        : info_(std::move(info)),
          control_(std::move(control)),
          links_(std::move(links)),
          counters_(counters) {}

    const transport::PeerInfo& info() const { return info_; }
    transport::tcp::Link& control() { return *control_; }
    bool copies() const { return links_.front()->transport() != "tcp"; }
    std::string transport_for(MemoryKind kind) const;

    // Carries the job on the calling thread.
    Outcome run(transport::Job& job);
    // On other threads; finished() is called once.
    using Finished = std::function<void(Outcome)>;
    void post(std::shared_ptr<transport::Job> job, transport::Workers& workers, Finished finished);

    void close() { control_->close(); }

    // What to say of a job that did not go well.
    TransferFailure explain(const transport::Job& job, const Outcome& outcome) const;

   private:
    void post_to(size_t link, std::shared_ptr<transport::Job> job, transport::Workers& workers,
                 Outcome outcome, Finished finished);
    // True: nothing is left for other links.
    bool account(transport::Job& job, const transport::Link& link, Status status, Outcome& outcome) const;

    transport::PeerInfo info_;
    std::shared_ptr<transport::tcp::Link> control_;
    std::vector<std::shared_ptr<transport::Link>> links_;
    transport::Counters& counters_;
};

}  // namespace moonpool::engine
