// Loopback: engines of one process copy between their regions.
#pragma once

#include "transport/loopback/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::loopback {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context);

    Status start() override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    bool is_out(const SegmentId& segment) override { return target_->is_out(segment); }
    void withdraw() override;

   private:
    std::shared_ptr<Target> target_;
};

}  // namespace moonpool::transport::loopback
