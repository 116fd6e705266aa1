#include "transport/tcp/transport.hpp"

#include "transport/tcp/link.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

Transport::Transport(const Context& context) : context_(context), target_(context) {}

Result<Contact> Transport::call(const std::string& address) {
    const ConnectOptions& options = context_.options;
    PoolOptions pool;
    pool.dial = DialOptions{address,
                            options.token,
                            context_.identity.tenant,
                            std::string(kServiceEngine),
                            options.timeout_ms,
                            options.interface};
    pool.dial.given_up = &context_.closing;
    context_.counters.dials_total.fetch_add(1);
    Result<Dialed> dialed = dial(pool.dial);
    if (!dialed) return dialed.error();
    std::optional<PeerInfo> info = decode_welcome(dialed->welcome);
    if (!info) return Error{Code::kProtocol, address + " sent an unreadable welcome"};
    info->address = address;
    pool.self = context_.identity.segment;
    pool.self_name = context_.identity.name;
    pool.peer = info->segment;
    pool.connections_max = options.connections_per_peer;
    if (options.frame_bytes != 0) pool.frame_bytes = options.frame_bytes;
    auto link = std::make_shared<Link>(pool, context_.loops, context_.waiters, counters_, context_.counters);
    if (Status status = link->pool().adopt(std::move(*dialed), options.timeout_ms); !status) {
        return status.error();
    }
    return Contact{std::move(*info), std::move(link)};
}

// Slices travel over the connections of the control channel: a peer has one pool of them.
Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo&,
                                                            const std::shared_ptr<Control>& control, int) {
    auto link = std::dynamic_pointer_cast<Link>(control);
    if (link == nullptr) return Error{Code::kUnavailable, "the control channel is not of this transport"};
    return std::shared_ptr<transport::Link>(std::move(link));
}

void Transport::metrics(const std::string& name, Metrics& rows) const {
    append(name, counters_, rows);
    // What peers moved by other transports they moved themselves; nothing here sees it.
    append("served_" + name, target_.counters(), rows);
    rows.insert(rows.end(), {{"connections", context_.counters.connections},
                             {"connections_max", kConnectionsMax},
                             {"connections_refused_total", context_.counters.connections_refused_total},
                             {"fenced_total", context_.counters.fenced_total},
                             {"dials_total", context_.counters.dials_total}});
}

}  // namespace moonpool::transport::tcp
