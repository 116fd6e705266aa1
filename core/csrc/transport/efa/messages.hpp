// What two engines say to each other of libfabric (docs/wire_engine.md): the offer in the handshake, and the
// ends of a connection. Decoders answer with nothing when a byte is missing or over a limit; a later version
// may append.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "wire/frame.hpp"

namespace moonpool::transport::efa {

inline constexpr const char* kName = "efa";  // in the registry and on the wire

// NICs are in the order of the target's; their numbers are ports of CONNECT.
struct Offer {
    std::string provider;
    std::vector<std::string> nics;
};
std::vector<std::byte> encode_offer(const Offer& offer);
std::optional<Offer> decode_offer(std::span<const std::byte> body);

struct PeerEndpoint {
    bool by_address = false;         // of a target: its memory is named by address, else by offset
    std::vector<std::byte> address;  // in the provider's form
};
std::vector<std::byte> encode_endpoint(const PeerEndpoint& endpoint);
std::optional<PeerEndpoint> decode_endpoint(Reader r);

}  // namespace moonpool::transport::efa
