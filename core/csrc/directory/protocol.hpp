// The parts of which the master's frames are made (docs/wire_master.md has the byte tables): written by one
// side, read by the other, so both stand here. A reader checks every count against what is left.
#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "directory/delta_log.hpp"
#include "directory/drop_list.hpp"
#include "directory/requests.hpp"
#include "directory/types.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline constexpr size_t kTextMax = 256;  // of a name, a host, an address, a path
inline constexpr size_t kTenantsMax = 256;

inline constexpr size_t kDeltaRowBytes = 17;
inline constexpr uint8_t kDeltaRemoved = 0x80;
inline constexpr uint8_t kDeltaBegin = 1;    // flags of DELTA: the inventory begins with this frame
inline constexpr uint8_t kDeltaEnd = 2;      // and ends with this one
inline constexpr uint8_t kDeltaApplied = 4;  // and says up to which removal its rows are checked

inline constexpr uint8_t kJoinResumed = 1;
inline constexpr uint8_t kJoinRecovered = 1;  // of the question: no master has told this process anything yet
inline constexpr uint8_t kDropAll = 1;

inline constexpr uint8_t kLocatePrefix = 1;
inline constexpr uint8_t kLocateSuspects = 2;
inline constexpr uint8_t kLocateOrder = 4;   // the keys are about to be removed or replaced;
inline constexpr uint8_t kLocateUnique = 8;  // those that have a copy are not
inline constexpr uint8_t kPlaceEvict = 1;

inline void write_hash(Writer& w, const Hash128& hash) {
    w.number(hash.low);
    w.number(hash.high);
}
inline Hash128 hash_at(const char* from) {
    Hash128 hash;
    std::memcpy(&hash.low, from, 8);
    std::memcpy(&hash.high, from + 8, 8);
    return hash;
}
inline Hash128 read_hash(Reader& r) {
    auto low = r.number<uint64_t>();
    return Hash128{low, r.number<uint64_t>()};
}

inline void write_row(Writer& w, const DeltaRow& row) {
    write_hash(w, row.hash);
    w.number(static_cast<uint8_t>(static_cast<uint8_t>(row.tier) | (row.added ? 0 : kDeltaRemoved)));
}
inline std::optional<DeltaRow> row_at(const char* from) {
    auto what = static_cast<uint8_t>(from[16]);
    auto tier = static_cast<uint8_t>(what & ~kDeltaRemoved);
    if (tier >= kTiers) return std::nullopt;
    return DeltaRow{hash_at(from), static_cast<Tier>(tier), (what & kDeltaRemoved) == 0};
}

inline bool read_text(Reader& r, std::string& text) {
    text = std::string(r.text16());
    return r.ok() && text.size() <= kTextMax;
}

inline void write_load(Writer& w, const NodeLoad& load) {
    w.number(load.ssd_bytes);
    w.number(load.ssd_free_bytes);
    w.number(static_cast<uint16_t>(load.tenants.size()));
    for (const TenantLoad& tenant : load.tenants) {
        w.text16(tenant.tenant);
        w.number(tenant.arena_bytes);
        w.number(tenant.free_bytes);
        w.number(tenant.objects);
        w.number(tenant.oldest_age_ms);
    }
}
inline bool read_load(Reader& r, NodeLoad& load) {
    load.ssd_bytes = r.number<uint64_t>();
    load.ssd_free_bytes = r.number<uint64_t>();
    auto tenants = r.number<uint16_t>();
    if (tenants > kTenantsMax) return false;
    for (uint16_t i = 0; i < tenants; ++i) {
        TenantLoad& tenant = load.tenants.emplace_back();
        if (!read_text(r, tenant.tenant)) return false;
        tenant.arena_bytes = r.number<uint64_t>();
        tenant.free_bytes = r.number<uint64_t>();
        tenant.objects = r.number<uint64_t>();
        tenant.oldest_age_ms = r.number<uint64_t>();
    }
    return r.ok();
}

inline void write_identity(Writer& w, const NodeIdentity& who) {
    w.bytes(who.incarnation.data(), who.incarnation.size());
    w.text16(who.name);
    w.text16(who.host_id);
    w.text16(who.address);
    w.text16(who.socket_path);
}
inline bool read_identity(Reader& r, NodeIdentity& who) {
    std::string_view incarnation = r.bytes(who.incarnation.size());
    if (!r.ok()) return false;
    std::memcpy(who.incarnation.data(), incarnation.data(), incarnation.size());
    return read_text(r, who.name) && read_text(r, who.host_id) && read_text(r, who.address) &&
           read_text(r, who.socket_path);
}

// Where a node's KV events are published: behind all else in JOIN and in the answer to MEMBERS, so that a
// peer of an earlier version, which does not read or write them, understands the rest.
inline void write_event_endpoints(Writer& w, const NodeIdentity& who) {
    w.text16(who.events);
    w.text16(who.events_replay);
}
inline bool read_event_endpoints(Reader& r, NodeIdentity& who) {
    if (r.left() == 0) return true;  // of an earlier version
    return read_text(r, who.events) && read_text(r, who.events_replay);
}

// LOCATE, before its n hashes.
struct LocateHead {
    uint8_t flags = 0, holders_max = 0;
    uint16_t width = 1;
    uint32_t n = 0;

    void write(Writer& w) const {
        w.number(flags);
        w.number(holders_max);
        w.number(width);
        w.number(n);
    }
    static LocateHead read(Reader& r) {
        LocateHead head;
        head.flags = r.number<uint8_t>();
        head.holders_max = r.number<uint8_t>();
        head.width = r.number<uint16_t>();
        head.n = r.number<uint32_t>();
        return head;
    }
};
// With kLocateOrder: the number of the node that is to have the new bytes, and 1; 0: none, or it is not
// known.
inline uint16_t order_width(const Members* members, const Incarnation* placing) {
    const Member* member = members == nullptr || placing == nullptr ? nullptr : members->find(*placing);
    return member == nullptr || member->id == kNoNode ? uint16_t{0} : static_cast<uint16_t>(member->id + 1);
}
// The holders of one key in its answer; to `out`, unless that is null.
inline void read_holders(Reader& r, Located* out) {
    auto holders = r.number<uint8_t>();
    for (uint8_t k = 0; k < holders; ++k) {
        auto node = r.number<NodeId>();
        auto tier = r.number<uint8_t>();
        if (tier < kTiers && out != nullptr) out->append({node, static_cast<Tier>(tier)});
    }
    if (out != nullptr) out->end_key();
}

// FORGET, before its n hashes.
inline void write_forget_head(Writer& w, uint32_t n, std::span<const NodeId> unreached) {
    w.number(n);
    w.number(static_cast<uint16_t>(unreached.size()));
    w.number(uint16_t{0});
    w.bytes(unreached.data(), unreached.size_bytes());
}

// ORDERED, the end of removals or replacements that a LOCATE with kLocateOrder began: which nodes know of
// which, in the membership of that epoch, and which have the new bytes. Behind the head come n hashes, then
// for each key one bit of each node, set where it was told, and then the same for where the key was placed.
struct Ordered {
    Version first = kNoVersion;  // of the first key; the others follow
    uint64_t epoch = 0;
    std::vector<NodeId> nodes{};
    std::string_view hashes{}, told{}, placed{};

    size_t keys() const { return hashes.size() / sizeof(Hash128); }
    size_t row_bytes() const { return (nodes.size() + 7) / 8; }  // of the bits of one key
    bool is_told(size_t key, size_t node) const { return bit(told, key, node); }
    bool is_placed(size_t key, size_t node) const { return bit(placed, key, node); }

    void write(Writer& w) const {
        w.number(first);
        w.number(epoch);
        w.number(static_cast<uint32_t>(keys()));
        w.number(static_cast<uint16_t>(nodes.size()));
        w.number(uint16_t{0});
        w.bytes(nodes.data(), nodes.size() * sizeof(NodeId));
        w.bytes(hashes.data(), hashes.size());
        w.bytes(told.data(), told.size());
        w.bytes(placed.data(), placed.size());
    }
    static std::optional<Ordered> read(Reader& r) {
        Ordered ordered;
        ordered.first = r.number<Version>();
        ordered.epoch = r.number<uint64_t>();
        uint64_t n = r.number<uint32_t>();
        auto nodes = r.number<uint16_t>();
        r.number<uint16_t>();
        if (!r.ok() || nodes * sizeof(NodeId) > r.left()) return std::nullopt;
        ordered.nodes.resize(nodes);
        for (NodeId& node : ordered.nodes) node = r.number<NodeId>();
        uint64_t bits = n * ordered.row_bytes();
        if (!r.ok() || r.left() != n * sizeof(Hash128) + 2 * bits) return std::nullopt;
        ordered.hashes = r.bytes(n * sizeof(Hash128));
        ordered.told = r.bytes(bits);
        ordered.placed = r.bytes(bits);
        return ordered;
    }

   private:
    bool bit(std::string_view bits, size_t key, size_t node) const {
        return (static_cast<uint8_t>(bits[key * row_bytes() + node / 8]) >> (node % 8) & 1) != 0;
    }
};

// One frame of it: n keys of a call from `begin` on.
class OrderedFrame {
   public:
    OrderedFrame(const OrderDone& done, size_t begin, size_t n) {
        ordered_.first = done.versions[begin];
        ordered_.epoch = done.epoch;
        ordered_.hashes =
            std::string_view(reinterpret_cast<const char*>(done.keys.data() + begin), n * sizeof(Hash128));
        for (auto* nodes : {&done.told, &done.placed}) {
            for (size_t i = begin; i < begin + n; ++i) {
                for (NodeId node : (*nodes)[i]) {
                    if (std::ranges::find(ordered_.nodes, node) == ordered_.nodes.end())
                        ordered_.nodes.push_back(node);
                }
            }
        }
        told_ = bits(done.told, begin, n);
        placed_ = bits(done.placed, begin, n);
        ordered_.told = told_;
        ordered_.placed = placed_;
    }
    OrderedFrame(const OrderedFrame&) = delete;
    void write(Writer& w) const { ordered_.write(w); }

   private:
    std::string bits(const std::vector<std::vector<NodeId>>& of, size_t begin, size_t n) const {
        std::string bits(n * ordered_.row_bytes(), '\0');
        for (size_t i = 0; i < n; ++i) {
            for (NodeId node : of[begin + i]) {
                auto k =
                    static_cast<size_t>(std::ranges::find(ordered_.nodes, node) - ordered_.nodes.begin());
                char& byte = bits[i * ordered_.row_bytes() + k / 8];
                byte = static_cast<char>(byte | 1 << k % 8);
            }
        }
        return bits;
    }

    Ordered ordered_;
    std::string told_, placed_;
};

// REMOVALS, what a node knows of removals that this master may not know, before its inventory:
// u64 complete since, u32 n, n hashes with a version each.
inline constexpr size_t kRemovalBytes = 24;

// What a node is to drop, at the end of the answers to JOIN and BEAT. A node of the release before reads no
// more than the hashes, and drops whatever copies there are.
inline void write_drops(Writer& w, const DropList& drops, size_t items_max) {
    size_t n = std::min(items_max, drops.items().size());
    w.number(static_cast<uint8_t>(drops.all() ? kDropAll : 0));
    w.number(drops.first());
    w.number(static_cast<uint32_t>(n));
    for (size_t i = 0; i < n; ++i) write_hash(w, drops.items()[i].hash);
}
// Behind it: the versions, and up to which removal the node is right when it has carried all that out;
// kNoVersion: there is more to come.
inline void write_versions(Writer& w, const DropList& drops, size_t items_max, Version upto) {
    size_t n = std::min(items_max, drops.items().size());
    w.number(drops.all_before());
    w.number(n == drops.items().size() ? upto : kNoVersion);
    for (size_t i = 0; i < n; ++i) w.number(drops.items()[i].version);
}
struct Drops {
    bool all = false;
    Version all_before = UINT64_MAX;  // with all: copies that are older
    Version upto = kNoVersion;
    uint64_t first = 0;
    std::vector<Drop> items;
};
inline bool read_drops(Reader& r, Drops& drops) {
    drops.all = (r.number<uint8_t>() & kDropAll) != 0;
    drops.first = r.number<uint64_t>();
    auto n = r.number<uint32_t>();
    if (!r.ok() || n > r.left() / sizeof(Hash128)) return false;
    drops.items.resize(n);
    for (Drop& drop : drops.items) drop = Drop{read_hash(r), UINT64_MAX};
    if (!r.ok() || r.left() == 0) return r.ok();  // of an earlier version
    drops.all_before = r.number<Version>();
    drops.upto = r.number<Version>();
    for (Drop& drop : drops.items) drop.version = r.number<Version>();
    return r.ok();
}

}  // namespace moonpool
