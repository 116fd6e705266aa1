#include "transport/shm/transport.hpp"

#include "transport/shm/link.hpp"

namespace moonpool::transport::shm {

Transport::Transport(const Context& context) : context_(context), target_(context) {}

std::string Transport::viable(const Context& context) {
    if (!context.identity.boot_id.empty()) return "";
    return "the kernel does not tell its boot id, so no two processes can prove their host";
}

void Transport::offer(PeerInfo& self) const {
    self.shm = {.socket = target_.socket(), .cookie = target_.cookie()};
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int timeout_ms) {
    auto link = std::make_shared<Link>(*context_.loops.front(), counters_, context_.options.machine);
    if (Status status = link->open(peer, context_.identity, timeout_ms); !status) return status.error();
    return std::shared_ptr<transport::Link>(std::move(link));
}

// All regions share a generation: the initiators ask for the list again, and find this one gone.
uint64_t Transport::revoke(const Region&) { return target_.revoke(); }

}  // namespace moonpool::transport::shm
