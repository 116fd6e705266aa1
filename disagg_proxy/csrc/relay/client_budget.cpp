#include "relay/client_budget.hpp"

#include <algorithm>
#include <string>

namespace moonpool::relay {

namespace {

constexpr size_t kPageBodiesShare = 8;  // of bodies_bytes_max, for the proxy's own pages besides

}  // namespace

ClientBudget::ClientBudget(const Limits& limits) : limits_(limits) {
    engines_.most = limits.bodies_bytes_max;
    pages_.most = engines_.most / kPageBodiesShare;
}

std::optional<http::Refusal> ClientBudget::take_body(For whom, Held& address, size_t bytes) {
    Purse& purse = of(whom);
    if (purse.held + bytes > purse.most) {
        return http::Refusal{503, "bodies_held",
                             "the proxy holds as many request bodies as it may; try again"};
    }
    auto share = static_cast<size_t>(static_cast<double>(purse.most) * limits_.address_share);
    share = std::max(share, std::min(purse.most, limits_.body_bytes_max));  // at least one of any size
    if (address.body_bytes + bytes > share) {
        return http::Refusal{429, "address_bodies",
                             "your address has its share of " + std::to_string(share) +
                                 " bytes of request bodies here; wait for some, or have the operator raise "
                                 "proxy.address_share"};
    }
    purse.held += bytes;
    address.body_bytes += bytes;
    return std::nullopt;
}

void ClientBudget::give_body(For whom, Held& address, size_t bytes) {
    of(whom).held -= bytes;
    address.body_bytes -= bytes;
}

bool ClientBudget::check_integrity(size_t body_bytes, size_t unread_bytes) const {
    return body_bytes == this->body_bytes() && unread_bytes == unread_bytes_ &&
           engines_.held <= engines_.most && pages_.held <= pages_.most;
}

}  // namespace moonpool::relay
