// EFA: the NICs of AWS instances read and write registered memory, by libfabric's reliable datagrams. Another
// provider of libfabric may be chosen (FabricOptions): tests have that which works over TCP.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/efa/progress.hpp"
#include "transport/nic/keys.hpp"
#include "transport/nic/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::efa {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context) : context_(context) {}
    ~Transport() override;

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
    Result<std::unique_ptr<nic::TargetEnd>> serve(uint8_t port, Reader question, Writer& answer) const;

    const Context context_;
    std::vector<std::shared_ptr<Server>> servers_;  // of each NIC; none before start()
    std::shared_ptr<Progress> progress_;
    std::shared_ptr<nic::Keys> keys_;
    std::optional<nic::Target> target_;
    std::atomic<uint32_t> next_rail_{0};
};

}  // namespace moonpool::transport::efa
