#include "transport/nic/messages.hpp"

#include <algorithm>

namespace moonpool::transport::nic {

namespace {

// A question of a transport, as the frame for questions to transports has it.
Writer begin_question(std::vector<std::byte>& out, std::string_view transport, Question question) {
    Writer w(out);
    w.text16(transport);
    w.number(static_cast<uint8_t>(question));
    return w;
}

}  // namespace

std::vector<std::byte> connect_question(std::string_view transport, uint32_t rail, uint8_t port,
                                        std::span<const std::byte> initiator) {
    std::vector<std::byte> out;
    Writer w = begin_question(out, transport, Question::kConnect);
    w.number(rail);
    w.number(port);
    w.bytes(initiator.data(), initiator.size());
    return out;
}

std::vector<std::byte> end_question(std::string_view transport, uint32_t rail) {
    std::vector<std::byte> out;
    begin_question(out, transport, Question::kEnd).number(rail);
    return out;
}

std::vector<std::byte> keys_question(std::string_view transport, const std::vector<Range>& ranges) {
    std::vector<std::byte> out;
    Writer w = begin_question(out, transport, Question::kKeys);
    w.number(static_cast<uint16_t>(ranges.size()));
    for (const Range& range : ranges) {
        w.number(range.address);
        w.number(range.length);
    }
    return out;
}

void encode(Writer& w, const Region& region, const KeyedRegion* keyed, KeySize size) {
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
            if (size == KeySize::k32) w.number(static_cast<uint32_t>(key.remote));
            if (size == KeySize::k64) w.number(key.remote);
        }
    }
}

std::optional<std::vector<RemoteRegion>> decode_keys(Reader r, KeySize size) {
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
        if (row.chunk_bytes == 0 || row.devices > kDevicesMax) return std::nullopt;
        uint64_t chunks = (row.length - 1) / row.chunk_bytes + 1;
        const uint64_t key_bytes = 1 + static_cast<uint64_t>(size);
        if (chunks > kChunksMax || chunks * row.devices * key_bytes > r.left()) return std::nullopt;
        row.keys.resize(chunks * row.devices);
        for (Key& key : row.keys) {
            auto state = r.number<uint8_t>();
            key.state = state <= 2 ? static_cast<KeyState>(state) : KeyState::kRefused;
            key.remote = size == KeySize::k32 ? r.number<uint32_t>() : r.number<uint64_t>();
        }
    }
    if (!r.done()) return std::nullopt;
    return rows;
}

}  // namespace moonpool::transport::nic
