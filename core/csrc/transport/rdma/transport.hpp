// RDMA: NICs of both hosts read and write registered memory, over RoCE v2 or InfiniBand.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nic/keys.hpp"
#include "transport/nic/target.hpp"
#include "transport/rdma/device.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::rdma {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context) : context_(context) {}

    static std::string viable(const Context& context);
    Status start() override;
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    Status add_region(Region& region) override;
    uint64_t revoke(const Region& region) override;
    bool drained(uint64_t revocation) override;
    Result<std::vector<std::byte>> answer(const SegmentId& peer, Reader question) override;
    void peer_left(const SegmentId& peer) override;
    void shut_out(const SegmentId& segment) override;
    void close() override;

   private:
    class PortEvents;
    Result<std::unique_ptr<nic::TargetEnd>> serve(uint8_t port, Reader question, Writer& answer) const;

    const Context context_;
    Nics nics_;  // none before start()
    std::shared_ptr<nic::Keys> keys_;
    std::optional<nic::Target> target_;
    std::atomic<uint32_t> next_rail_{0};
};

}  // namespace moonpool::transport::rdma
