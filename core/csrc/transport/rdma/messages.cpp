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
PortAddress decode_port(Reader& r) {
    PortAddress port;
    port.infiniband = r.number<uint8_t>() != 0;
    port.mtu = r.number<uint8_t>();
    port.lid = r.number<uint16_t>();
    std::string_view gid = r.bytes(port.gid.size());
    if (r.ok()) std::memcpy(port.gid.data(), gid.data(), gid.size());
    return port;
}
bool sound(const PortAddress& port) { return port.mtu >= 1 && port.mtu <= 5; }

}  // namespace

std::vector<std::byte> encode_offer(const std::vector<std::shared_ptr<Port>>& ports) {
    std::vector<std::byte> out;
    Writer w(out);
    size_t n = std::min(ports.size(), kPortsMax);
    w.number(static_cast<uint8_t>(n));
    for (size_t i = 0; i < n; ++i) {
        w.number(static_cast<uint8_t>(ports[i]->device_index));
        encode(w, ports[i]->address);
        w.text16(ports[i]->name);
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

namespace {

// A question of this transport, as the frame for questions to transports has it.
Writer begin_question(std::vector<std::byte>& out, Question question) {
    Writer w(out);
    w.text16(kName);
    w.number(static_cast<uint8_t>(question));
    return w;
}

}  // namespace

std::vector<std::byte> connect_question(const Connect& connect) {
    std::vector<std::byte> out;
    Writer w = begin_question(out, Question::kConnect);
    w.number(connect.rail);
    w.number(connect.port);
    encode(w, connect.initiator);
    return out;
}

std::vector<std::byte> end_question(uint32_t rail) {
    std::vector<std::byte> out;
    begin_question(out, Question::kEnd).number(rail);
    return out;
}

std::vector<std::byte> keys_question(const std::vector<Range>& ranges) {
    std::vector<std::byte> out;
    Writer w = begin_question(out, Question::kKeys);
    w.number(static_cast<uint16_t>(ranges.size()));
    for (const Range& range : ranges) {
        w.number(range.address);
        w.number(range.length);
    }
    return out;
}

void encode(Writer& w, const Region& region, const KeyedRegion* keyed) {
    w.number(region.id);
    w.number(region.address);
    w.number(region.length);
    w.number(static_cast<uint8_t>(region.kind));
    w.text16(keyed == nullptr ? "" : keyed->why_refused());
    w.number(keyed == nullptr ? uint64_t{0} : keyed->chunk_bytes);
    w.number(static_cast<uint32_t>(keyed == nullptr ? 0 : keyed->devices));
    for (size_t c = 0; keyed != nullptr && c < keyed->chunks(); ++c) {
        for (size_t d = 0; d < keyed->devices; ++d) {
            Key key = keyed->key(c, d);
            w.number(static_cast<uint8_t>(key.state));
            w.number(key.remote);
        }
    }
}

std::optional<std::vector<RemoteRegion>> decode_keys(Reader r) {
    std::vector<RemoteRegion> rows(std::min<size_t>(r.number<uint16_t>(), kRangesMax));
    for (RemoteRegion& row : rows) {
        row.id = r.number<uint64_t>();
        row.address = r.number<uint64_t>();
        row.length = r.number<uint64_t>();
        row.kind = static_cast<MemoryKind>(r.number<uint8_t>());
        row.why_refused = r.text16();
        row.chunk_bytes = r.number<uint64_t>();
        row.devices = r.number<uint32_t>();
        if (!r.ok() || row.length == 0 || row.address + row.length < row.address) return std::nullopt;
        if (row.devices == 0) continue;
        if (row.chunk_bytes == 0 || row.devices > kPortsMax) return std::nullopt;
        uint64_t chunks = (row.length - 1) / row.chunk_bytes + 1;
        if (chunks > kChunksMax || chunks * row.devices * 5 > r.left()) return std::nullopt;
        row.keys.resize(chunks * row.devices);
        for (Key& key : row.keys) {
            auto state = r.number<uint8_t>();
            key.state = state <= 2 ? static_cast<KeyState>(state) : KeyState::kRefused;
            key.remote = r.number<uint32_t>();
        }
    }
    if (!r.done()) return std::nullopt;
    return rows;
}

}  // namespace moonpool::transport::rdma
