// What two engines say to each other about RDMA (docs/wire_engine.md): the offer in the handshake, and the
// ends of a connection. Decoders answer with nothing when a byte is missing, too many, or over a limit.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transport/rdma/queue_pair.hpp"
#include "wire/frame.hpp"

namespace moonpool::transport::rdma {

inline constexpr const char* kName = "rdma";  // in the registry and on the wire
inline constexpr size_t kPortsMax = 16;       // of an engine

// A port in an offer.
struct OfferedPort {
    uint8_t device = 0;  // ports of one device share its keys
    PortAddress address;
    std::vector<Gid> gids;  // by which it may be reached; the first is that of the address
    std::string name;
};
std::vector<std::byte> encode_offer(const std::vector<std::shared_ptr<Port>>& ports);
std::optional<std::vector<OfferedPort>> decode_offer(std::span<const std::byte> body);

// What CONNECT carries of the initiator, and its answer of the target.
void encode(Writer& w, const Endpoint& endpoint);
Endpoint decode_endpoint(Reader& r);

}  // namespace moonpool::transport::rdma
