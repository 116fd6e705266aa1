// CUDA IPC: engines of one host open each other's memory of cards, and a card copies it without the host.
#pragma once

#include "transport/cuda_ipc/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::cuda_ipc {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context);

    // Says nothing of cards: no driver is opened before one is used.
    static std::string viable(const Context& context);
    Status start() override { return target_.start(); }
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    Status add_region(Region& region) override;
    uint64_t revoke(const Region& region) override;
    bool drained(uint64_t revocation) override { return target_.drained(revocation); }
    void shut_out(const SegmentId& segment) override { target_.shut_out(segment); }
    bool is_out(const SegmentId& segment) override { return target_.is_out(segment); }
    void close() override { target_.close(); }

   private:
    const Context context_;
    Target target_;
};

}  // namespace moonpool::transport::cuda_ipc
