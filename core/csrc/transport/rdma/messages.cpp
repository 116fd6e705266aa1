#include "transport/rdma/messages.hpp"

#include <algorithm>
#include <cstring>

namespace moonpool::transport::rdma {

namespace {

void encode(Writer& w, const PortAddress& port) {
    w.number(static_cast<uint8_t>(port.infiniband));
    w.number(port.mtu);
    w.number(port.lid);
    w.bytes(port.gid.data(), port.gid.size());
}
Gid decode_gid(Reader& r) {
    Gid gid{};
    std::string_view bytes = r.bytes(gid.size());
    if (r.ok()) std::memcpy(gid.data(), bytes.data(), gid.size());
    return gid;
}
PortAddress decode_port(Reader& r) {
    PortAddress port;
    port.infiniband = r.number<uint8_t>() != 0;
    port.mtu = r.number<uint8_t>();
    port.lid = r.number<uint16_t>();
    port.gid = decode_gid(r);
    return port;
}
bool sound(const PortAddress& port) { return port.mtu >= 1 && port.mtu <= 5; }

}  // namespace

std::vector<std::byte> encode_offer(const std::vector<std::shared_ptr<Port>>& ports) {
    std::vector<std::byte> out;
    Writer w(out);
    size_t n = std::min(ports.size(), kPortsMax);
    w.number(static_cast<uint8_t>(n));
    std::vector<PortFacts> facts;
    for (size_t i = 0; i < n; ++i) facts.push_back(ports[i]->facts());
    for (size_t i = 0; i < n; ++i) {
        w.number(static_cast<uint8_t>(ports[i]->device_index));
        encode(w, facts[i].address);
        w.text16(ports[i]->name);
    }
    for (size_t i = 0; i < n; ++i) {
        const std::vector<GidEntry>& gids = facts[i].gids;
        const size_t offered = std::min(gids.size(), kGidsTriedMax);
        w.number(static_cast<uint8_t>(offered - 1));
        for (size_t k = 1; k < offered; ++k) w.bytes(gids[k].gid.data(), gids[k].gid.size());
    }
    return out;
}

std::optional<std::vector<OfferedPort>> decode_offer(std::span<const std::byte> body) {
    Reader r(body);
    std::vector<OfferedPort> ports(r.number<uint8_t>());
    if (ports.size() > kPortsMax) return std::nullopt;
    for (OfferedPort& port : ports) {
        port.device = r.number<uint8_t>();
        port.address = decode_port(r);
        port.name = r.text16();
        if (!r.ok() || !sound(port.address) || port.device >= kPortsMax) return std::nullopt;
        port.gids = {port.address.gid};
    }
    const bool further = r.left() != 0;  // an engine of a release before says none
    for (size_t k = 0; further && k < ports.size(); ++k) {
        auto n = r.number<uint8_t>();
        if (n >= kGidsMax) return std::nullopt;
        for (uint8_t i = 0; i < n; ++i) ports[k].gids.push_back(decode_gid(r));
    }
    if (!r.ok()) return std::nullopt;  // a later version may append fields
    return ports;
}

void encode(Writer& w, const Endpoint& endpoint) {
    encode(w, endpoint.port);
    w.number(endpoint.number);
    w.number(endpoint.psn);
    w.number(endpoint.reads);
}
Endpoint decode_endpoint(Reader& r) {
    Endpoint endpoint;
    endpoint.port = decode_port(r);
    endpoint.number = r.number<uint32_t>();
    endpoint.psn = r.number<uint32_t>();
    endpoint.reads = r.number<uint8_t>();
    if (!sound(endpoint.port) || endpoint.psn > 0xffffff || endpoint.reads == 0) {
        (void)r.bytes(r.left() + 1);  // it stays failed
    }
    return endpoint;
}

}  // namespace moonpool::transport::rdma
