// RDMA: NICs of both hosts read and write registered memory, over RoCE v2 or InfiniBand.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/nic/transport.hpp"
#include "transport/rdma/device.hpp"

namespace moonpool::transport::rdma {

class Transport final : public nic::Transport {
   public:
    explicit Transport(const Context& context) : nic::Transport(context, "RDMA") {}
    ~Transport() override { end(); }

    static std::string viable(const Context& context);
    Status start() override;
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;

   private:
    class PortEvents;
    Result<std::unique_ptr<nic::TargetEnd>> serve(uint8_t port, Reader question, Writer& answer) const;

    Nics nics_;  // none before start()
};

}  // namespace moonpool::transport::rdma
