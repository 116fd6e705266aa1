#include "transport/efa/messages.hpp"

#include "transport/nic/messages.hpp"

namespace moonpool::transport::efa {

namespace {

constexpr size_t kAddressMax = 256;

}  // namespace

std::vector<std::byte> encode_offer(const Offer& offer) {
    std::vector<std::byte> out;
    Writer w(out);
    w.text16(offer.provider);
    w.number(static_cast<uint8_t>(offer.nics.size()));
    for (const std::string& nic : offer.nics) w.text16(nic);
    return out;
}

std::optional<Offer> decode_offer(std::span<const std::byte> body) {
    Reader r(body);
    Offer offer;
    offer.provider = r.text16();
    offer.nics.resize(std::min<size_t>(r.number<uint8_t>(), nic::kDevicesMax));
    for (std::string& nic : offer.nics) nic = r.text16();
    if (!r.ok() || offer.nics.empty()) return std::nullopt;
    return offer;
}

std::vector<std::byte> encode_endpoint(const PeerEndpoint& endpoint) {
    std::vector<std::byte> out;
    Writer w(out);
    w.number(static_cast<uint8_t>(endpoint.by_address));
    w.number(static_cast<uint16_t>(endpoint.address.size()));
    w.bytes(endpoint.address.data(), endpoint.address.size());
    return out;
}

std::optional<PeerEndpoint> decode_endpoint(Reader r) {
    PeerEndpoint endpoint;
    endpoint.by_address = r.number<uint8_t>() != 0;
    std::string_view address = r.bytes16();
    if (!r.ok() || address.empty() || address.size() > kAddressMax) return std::nullopt;
    auto bytes = std::as_bytes(std::span(address));
    endpoint.address.assign(bytes.begin(), bytes.end());
    return endpoint;
}

}  // namespace moonpool::transport::efa
