// TCP: reaches every peer, and carries the control channel of all of them.
#pragma once

#include "transport/tcp/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::tcp {

class Transport final : public transport::Transport, public ControlCarrier {
   public:
    explicit Transport(const Context& context);

    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    void shut_out(const SegmentId& segment) override { target_.shut_out(segment); }
    bool is_out(const SegmentId& segment) override { return target_.is_out(segment); }
    void metrics(const std::string& name, Metrics& rows) const override;

    ControlCarrier* control() override { return this; }
    void adopt(AuthenticatedConnection caller) override { target_.adopt(std::move(caller)); }
    Result<Contact> call(const std::string& address) override;

   private:
    const Context context_;
    const std::shared_ptr<StagingPool> staging_ = std::make_shared<StagingPool>();
    Target target_;
};

}  // namespace moonpool::transport::tcp
