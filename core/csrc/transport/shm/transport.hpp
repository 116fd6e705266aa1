// Shared memory: processes of one host touch each other's regions without a message.
#pragma once

#include "transport/shm/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::shm {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context);

    static std::string viable(const Context& context);
    Status start() override { return target_.start(); }
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    uint64_t revoke(const Region& region) override;
    bool drained(uint64_t revocation) override { return target_.drained(revocation); }
    void shut_out(const SegmentId& segment) override { target_.shut_out(segment); }
    bool is_out(const SegmentId& segment) override { return target_.is_out(segment); }
    void close() override { target_.close(); }

   private:
    const Context context_;
    Target target_;
};

}  // namespace moonpool::transport::shm
