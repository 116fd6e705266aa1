#include "transport/cuda_ipc/transport.hpp"

#include "transport/cuda_ipc/link.hpp"

namespace moonpool::transport::cuda_ipc {

Transport::Transport(const Context& context) : context_(context), target_(context) {}

std::string Transport::viable(const Context& context) {
    if (!context.identity.boot_id.empty()) return "";
    return "the kernel does not tell its boot id, so no two processes can prove their host";
}

void Transport::offer(PeerInfo& self) const {
    self.cuda_ipc = {.socket = target_.socket(), .cookie = target_.cookie()};
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int) {
    if (peer.cuda_ipc.socket.empty()) return Error{Code::kUnavailable, "the peer does not offer CUDA IPC"};
    if (Status here = host::Client::may_be_here(peer, context_.identity); !here) return here.error();
    return std::shared_ptr<transport::Link>(std::make_shared<Link>(context_, counters_, peer));
}

// Memory that the driver does not share is registered all the same: other paths reach it.
Status Transport::add_region(Region& region) {
    if (region.on_card()) target_.share(region);
    return success();
}

uint64_t Transport::revoke(const Region& region) { return target_.take_back(region); }

}  // namespace moonpool::transport::cuda_ipc
