#include "transport/loopback/transport.hpp"

#include "transport/loopback/link.hpp"

namespace moonpool::transport::loopback {

Transport::Transport(const Context& context) : target_(std::make_shared<Target>()) {
    target_->identity = context.identity;
    target_->regions = context.regions;
    target_->shut_out = context.shut_out;
}

Status Transport::start() {
    enlist(target_);
    return success();
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int) {
    std::shared_ptr<Target> target = find_target(peer.segment);
    if (target == nullptr) return Error{Code::kUnavailable, "the peer is not in this process"};
    if (target->identity.tenant != target_->identity.tenant) {
        return Error{Code::kAuth, "the peer belongs to another tenant"};
    }
    std::shared_ptr<Guest> guest = target->welcome(target_->identity.segment);
    return std::shared_ptr<transport::Link>(
        std::make_shared<Link>(std::move(target), std::move(guest), counters_));
}

void Transport::withdraw() {
    strike_off(target_->identity.segment);
    target_->closed = true;
}

}  // namespace moonpool::transport::loopback
