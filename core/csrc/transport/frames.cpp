#include "transport/frames.hpp"

#include <algorithm>
#include <cstdio>

namespace moonpool::transport {

namespace {

template <size_t N>
void copy_bytes(std::array<uint8_t, N>& out, std::string_view bytes) {
    if (bytes.size() == N) std::memcpy(out.data(), bytes.data(), N);
}

void encode(Writer& w, const HostOffer& offer) {
    w.text16(offer.socket);
    w.bytes(offer.cookie.data(), offer.cookie.size());
}
HostOffer decode_offer(Reader& r) {
    HostOffer offer;
    offer.socket = r.text16();
    copy_bytes(offer.cookie, r.bytes(offer.cookie.size()));
    return offer;
}

}  // namespace

std::vector<std::byte> encode_welcome(const PeerInfo& info) {
    std::vector<std::byte> out;
    out.reserve(1024);
    Writer w(out);
    w.number(info.versions.highest);
    w.bytes(info.segment.data(), info.segment.size());
    w.text16(info.name);
    w.text16(info.host_id);
    w.text16(info.boot_id);
    encode(w, info.shm);
    encode(w, info.cuda_ipc);
    w.number(static_cast<uint8_t>(info.offers.size()));
    for (const auto& [name, offer] : info.offers) {
        w.text16(name);
        w.number(static_cast<uint16_t>(offer.size()));
        w.bytes(offer.data(), offer.size());
    }
    w.number(info.versions.lowest);
    return out;
}

std::optional<PeerInfo> decode_welcome(std::span<const std::byte> body) {
    Reader r(body);
    PeerInfo info;
    info.versions.highest = r.number<uint16_t>();
    copy_bytes(info.segment, r.bytes(info.segment.size()));
    info.name = r.text16();
    info.host_id = r.text16();
    info.boot_id = r.text16();
    info.shm = decode_offer(r);
    if (!r.done()) info.cuda_ipc = decode_offer(r);  // engines of the version before end here
    auto offers = r.done() ? uint8_t{0} : r.number<uint8_t>();
    if (offers > kOffersMax) return std::nullopt;
    for (uint8_t i = 0; i < offers && r.ok(); ++i) {
        std::string name(r.text16());
        std::string_view offer = r.bytes16();
        if (offer.size() > kOfferBytesMax) return std::nullopt;
        auto bytes = std::as_bytes(std::span(offer.data(), offer.size()));
        info.offers[std::move(name)].assign(bytes.begin(), bytes.end());
    }
    // A peer of the release before ends here, and speaks all versions from 1.
    info.versions.lowest = r.done() ? uint16_t{1} : r.number<uint16_t>();
    // A later version may append fields.
    if (!r.ok() || info.versions.highest == 0 || !info.versions.valid() || info.name.size() > kNameBytesMax)
        return std::nullopt;
    info.version = highest_in_common(kEngineVersions, info.versions).value_or(0);
    return info;
}

void encode(Writer& w, const Hello& hello) {
    w.number(hello.versions.highest);
    w.bytes(hello.segment.data(), hello.segment.size());
    w.bytes(hello.expected.data(), hello.expected.size());
    w.number(hello.channel);
    w.text16(hello.name);
    w.number(hello.versions.lowest);
}

std::optional<Hello> decode_hello(Reader r) {
    Hello hello;
    hello.versions.highest = r.number<uint16_t>();
    copy_bytes(hello.segment, r.bytes(hello.segment.size()));
    copy_bytes(hello.expected, r.bytes(hello.expected.size()));
    hello.channel = r.number<uint32_t>();
    hello.name = r.text16();
    // As in WELCOME.
    hello.versions.lowest = r.done() ? uint16_t{1} : r.number<uint16_t>();
    if (!r.ok() || hello.versions.highest == 0 || !hello.versions.valid() ||
        hello.name.size() > kNameBytesMax)
        return std::nullopt;
    return hello;
}

std::vector<std::byte> regions_question(const PeerInfo& peer) {
    std::vector<std::byte> body;
    if (peer.version >= kVersionWithCards) Writer(body).number(peer.version);
    return body;
}

std::vector<std::byte> regions_question(const PeerInfo& peer, uint64_t edition) {
    std::vector<std::byte> body = regions_question(peer);
    // A peer that knows no editions reads no further, and answers with the list.
    if (!body.empty()) Writer(body).number(edition);
    return body;
}

std::optional<RegionsQuestion> decode_regions_question(Reader r) {
    RegionsQuestion question;
    if (r.done()) return question;
    question.version = r.number<uint16_t>();
    if (!r.ok() || question.version < kVersionWithCards) return std::nullopt;
    if (!r.done()) question.edition = r.number<uint64_t>();
    // A later version may append fields.
    if (!r.ok()) return std::nullopt;
    return question;
}

void encode_regions(Writer& w, const RegionList& regions, uint16_t version) {
    // Before it, a list with another kind than those of the host was unreadable.
    auto shown = [&](const auto& region) { return version >= kVersionWithCards || !region->on_card(); };
    w.number(static_cast<uint32_t>(std::ranges::count_if(regions, shown)));
    for (const auto& region : regions) {
        if (!shown(region)) continue;
        w.number(region->id);
        w.number(region->address);
        w.number(region->length);
        w.number(static_cast<uint8_t>(region->kind));
        w.text16(region->location);
    }
}

namespace {

std::optional<std::vector<RegionRow>> decode_rows(Reader& r) {
    auto n = r.number<uint32_t>();
    if (!r.ok() || n > kRegionsMax) return std::nullopt;
    std::vector<RegionRow> rows;
    uint64_t end = 0;
    for (uint32_t i = 0; i < n && r.ok(); ++i) {
        RegionRow row;
        row.id = r.number<uint64_t>();
        row.address = r.number<uint64_t>();
        row.length = r.number<uint64_t>();
        auto kind = r.number<uint8_t>();
        row.location = r.text16();
        // Sorted and apart: the lookups rely on it. Of a kind that is not known here it is listed all the
        // same, and no link reaches it.
        if (row.address < end || row.length == 0 || row.address + row.length < row.address) {
            return std::nullopt;
        }
        end = row.address + row.length;
        row.kind = static_cast<MemoryKind>(kind);
        rows.push_back(std::move(row));
    }
    if (!r.ok()) return std::nullopt;
    return rows;
}

}  // namespace

std::optional<std::vector<RegionRow>> decode_regions(Reader r) {
    std::optional<std::vector<RegionRow>> rows = decode_rows(r);
    return r.done() ? rows : std::nullopt;
}

void encode_changes(Writer& w, const RegionChanges& changes, uint16_t version) {
    encode_regions(w, changes.added, version);
    w.number(changes.edition);
    w.number(static_cast<uint8_t>(changes.whole ? 1 : 0));
    w.number(static_cast<uint32_t>(changes.removed.size()));
    for (const RegionChanges::Removed& removed : changes.removed) {
        w.number(removed.id);
        w.number(removed.address);
    }
}

std::optional<ChangedRows> decode_changes(Reader r) {
    ChangedRows changes;
    std::optional<std::vector<RegionRow>> rows = decode_rows(r);
    if (!rows) return std::nullopt;
    changes.added = std::move(*rows);
    if (r.done()) return changes;  // of a peer that knows no editions
    changes.edition = r.number<uint64_t>();
    changes.whole = r.number<uint8_t>() != 0;
    auto n = r.number<uint32_t>();
    if (!r.ok() || n > RegionTable::kChangesKept || (changes.whole && n != 0)) return std::nullopt;
    for (uint32_t i = 0; i < n; ++i) {
        auto id = r.number<uint64_t>();
        changes.removed.push_back({id, r.number<uint64_t>()});
    }
    // A later version may append fields.
    if (!r.ok()) return std::nullopt;
    return changes;
}

std::string read_boot_id() {
    char text[64] = {};
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
        if (std::fgets(text, sizeof(text), file) == nullptr) text[0] = 0;
        std::fclose(file);
    }
    std::string id(text);
    while (!id.empty() && id.back() == '\n') id.pop_back();
    return id;
}

}  // namespace moonpool::transport
