#include "transport/tcp/transport.hpp"

#include "transport/tcp/link.hpp"
#include "wire/dial.hpp"

namespace moonpool::transport::tcp {

Transport::Transport(const Context& context) : context_(context), target_(context, staging_) {}

Result<Contact> Transport::call(const std::string& address) {
    const ConnectOptions& options = context_.options;
    LinkOptions made;
    ChannelOptions& channel = made.channel;
    channel.dial = DialOptions{address,
                               options.token,
                               context_.identity.tenant,
                               std::string(kServiceEngine),
                               options.timeout_ms,
                               options.interface};
    channel.dial.given_up = &context_.closing;
    channel.dial.tls = options.tls;
    channel.staging = staging_;
    channel.journal = options.journal;
    context_.counters.dials_total.fetch_add(1);
    Result<Dialed> dialed = dial(channel.dial);
    tell_trouble(channel);
    if (!dialed) return dialed.error();
    std::optional<PeerInfo> info = decode_welcome(dialed->welcome);
    if (!info) return Error{Code::kProtocol, address + " sent an unreadable welcome"};
    info->address = address;
    channel.self = context_.identity.segment;
    channel.self_name = context_.identity.name;
    channel.peer = info->segment;
    made.connections_max = options.connections_per_peer;
    if (options.frame_bytes != 0) channel.frame_bytes = options.frame_bytes;
    auto link = std::make_shared<Link>(made, context_.loops, context_.waiters, counters_, context_.counters);
    Status status = link->adopt(std::move(*dialed));
    // Without a version in common the HELLO was sent all the same: by it the target heard of this engine's.
    if (info->version == 0) {
        return none_in_common({"this engine", kEngineVersions}, {address, info->versions}, kEngineFormat);
    }
    if (!status) return status.error();
    return Contact{std::move(*info), std::move(link)};
}

// Slices travel over the connections of the control channel: a peer has one set of them.
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
