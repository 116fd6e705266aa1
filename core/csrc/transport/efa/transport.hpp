// EFA: the NICs of AWS instances read and write registered memory, by libfabric's reliable datagrams. Another
// provider of libfabric may be chosen (FabricOptions): tests have that which works over TCP.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/efa/progress.hpp"
#include "transport/nic/transport.hpp"

namespace moonpool::transport::efa {

class Transport final : public nic::Transport {
   public:
    explicit Transport(const Context& context) : nic::Transport(context, "EFA") {}
    ~Transport() override;

    static std::string viable(const Context& context);
    Status start() override;
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    bool drained(uint64_t revocation) override;

   private:
    Result<std::unique_ptr<nic::TargetEnd>> serve(uint8_t port, Reader question, Writer& answer) const;

    std::vector<std::shared_ptr<Server>> servers_;  // of each NIC; none before start()
    std::shared_ptr<Progress> progress_;
};

}  // namespace moonpool::transport::efa
