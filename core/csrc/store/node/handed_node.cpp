#include "store/node/handed_node.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <type_traits>
#include <unordered_map>

#include "base/crc32c.hpp"
#include "wire/frame.hpp"

namespace moonpool {

namespace {

// u32 magic, u32 version, u64 bytes behind the head, u32 their CRC-32C, u32 0
constexpr size_t kHeadBytes = 24;
constexpr uint32_t kNone = UINT32_MAX;

// One place for both directions, so that they cannot differ: each value is written by Out and read by In.
class Out {
   public:
    explicit Out(std::vector<std::byte>& bytes) : w_(bytes) {}
    template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
    void operator()(const T& value) { w_.number(value); }
    void operator()(const std::string& text) { some(text.data(), text.size()); }
    void operator()(const std::vector<std::byte>& bytes) { some(bytes.data(), bytes.size()); }
    template <size_t N>
    void operator()(const std::array<uint8_t, N>& bytes) {
        w_.bytes(bytes.data(), N);
    }
    template <class T, class Each>
    void list(const std::vector<T>& rows, Each each) {
        w_.number(static_cast<uint64_t>(rows.size()));
        for (const T& row : rows) each(row);
    }
    bool ok() const { return true; }

   private:
    void some(const void* data, size_t size) {
        w_.number(static_cast<uint64_t>(size));
        w_.bytes(data, size);
    }
    Writer w_;
};

class In {
   public:
    explicit In(std::span<const std::byte> bytes) : r_(bytes) {}
    template <class T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
    void operator()(T& value) {
        if constexpr (std::is_same_v<T, bool>) {
            value = r_.number<uint8_t>() != 0;
        } else {
            value = r_.number<T>();
        }
    }
    void operator()(std::string& text) {
        std::string_view bytes = some();
        text.assign(bytes);
    }
    void operator()(std::vector<std::byte>& out) {
        std::string_view bytes = some();
        out.resize(bytes.size());
        if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    }
    template <size_t N>
    void operator()(std::array<uint8_t, N>& out) {
        std::string_view bytes = r_.bytes(N);
        if (bytes.size() == N) std::memcpy(out.data(), bytes.data(), N);
    }
    // A row has at least one byte: no list is longer than what follows.
    template <class T, class Each>
    void list(std::vector<T>& rows, Each each) {
        auto n = r_.number<uint64_t>();
        if (n > r_.left()) wrong_ = true;
        rows.reserve(std::min<uint64_t>(n, r_.left() / sizeof(T)));
        for (uint64_t i = 0; i < n && ok(); ++i) each(rows.emplace_back());
    }
    bool ok() const { return r_.ok() && !wrong_; }
    bool done() const { return ok() && r_.left() == 0; }

   private:
    std::string_view some() {
        auto size = r_.number<uint64_t>();
        if (size > r_.left()) wrong_ = true;
        return ok() ? r_.bytes(size) : std::string_view();
    }
    Reader r_;
    bool wrong_ = false;
};

template <class Stream, class E>
void visit_extent(Stream& s, E& extent) {
    s(extent.offset);
    s(extent.size);
}

template <class Stream, class H>
void visit_hash(Stream& s, H& hash) {
    s(hash.low);
    s(hash.high);
}

template <class Stream, class O>
void visit_object(Stream& s, O& o) {
    s(o.slot);
    s(o.detached);
    s(o.scrubbed);
    s(o.used);
    s(o.generation);
    s(o.last_used);
    s(o.parent);
    s(o.parent_generation);
    s(o.space);
    visit_extent(s, o.extent);
    s(o.crc);
    s(o.version);
    s(o.soft_ms);
    s(o.soft_left_ms);
    visit_hash(s, o.group);
    s(o.name);
}

template <class Stream, class P>
void visit_pool(Stream& s, P& pool) {
    s(pool.tenant);
    s(pool.salt);
    s(pool.arena_bytes);
    s(pool.committed_bytes);
    s(pool.generations);
    s(pool.uses);
    s.list(pool.absent, [&](auto& extent) { visit_extent(s, extent); });
    s(pool.all_opened);
    s.list(pool.spaces, [&](auto& space) {
        s(space.id);
        s(space.name_space);
        s(space.fingerprint);
    });
    s.list(pool.objects, [&](auto& object) { visit_object(s, object); });
}

template <class Stream, class C>
void visit_connection(Stream& s, C& c) {
    s(c.proved);
    s(c.remote);
    s(c.ended);
    s(c.nonce);
    s(c.tenant);
    s(c.access.is_cluster);
    s(c.access.role);
    s(c.access.key);
    s.list(c.spaces, [&](auto& space) { s(space); });
    s(c.last_space);
    s.list(c.leases, [&](auto& extent) { visit_extent(s, extent); });
    s.list(c.pins, [&](auto& pin) {
        s(pin.first);
        s.list(pin.second, [&](auto& pinned) {
            s(pinned.slot);
            s(pinned.generation);
        });
    });
    s(c.received);
    s(c.unsent);
}

template <class Stream, class N>
void visit_node(Stream& s, N& node) {
    s(node.incarnation);
    s(node.next_pin);
    s(node.tcp_sockets);
    s.list(node.pools, [&](auto& pool) { visit_pool(s, pool); });
    s.list(node.ranges, [&](auto& range) {
        s(range.applied);
        s(range.complete_since);
        s.list(range.removals, [&](auto& removal) {
            visit_hash(s, removal.hash);
            s(removal.version);
        });
    });
    s.list(node.connections, [&](auto& connection) { visit_connection(s, connection); });
}

Error lies(const std::string& what) {
    return Error{Code::kProtocol, "the running node's description of itself is not sound: " + what};
}

// The slots and generations of a pool's objects, by slot.
using Slots = std::vector<std::pair<uint32_t, uint64_t>>;

// Sorts them. Whether all lie below `end`, none across another.
bool disjoint(std::vector<Extent>& extents, uint64_t end) {
    std::ranges::sort(extents, {}, &Extent::offset);
    uint64_t from = 0;
    for (const Extent& extent : extents) {
        if (extent.offset < from || extent.offset > end || extent.size > end - extent.offset) return false;
        from = extent.end();
    }
    return true;
}

Result<Slots> check_pool(const HandedPool& pool, const std::vector<Extent>& leases) {
    if (pool.tenant.empty()) return lies("a tenant has no name");
    if (pool.committed_bytes > pool.arena_bytes) return lies("more memory is reserved than the arena has");
    const uint64_t end = pool.all_opened ? pool.arena_bytes : pool.committed_bytes;
    std::set<uint32_t> spaces;
    for (const HandedSpace& space : pool.spaces) {
        if (!spaces.insert(space.id).second || space.id >= 1u << 20 ||
            space.name_space.find('\0') != std::string::npos) {
            return lies("its spaces");
        }
    }
    Slots slots;
    slots.reserve(pool.objects.size());
    std::vector<Extent> extents;
    extents.reserve(pool.objects.size());
    for (const HandedObject& o : pool.objects) {
        bool known = o.generation != 0 && o.generation <= pool.generations && o.last_used <= pool.uses;
        if (!known || o.slot == kNone) return lies("the slots of objects");
        slots.emplace_back(o.slot, o.generation);
        if (!spaces.contains(o.space)) return lies("the space of an object");
        if (o.name.empty() || o.name.size() > UINT16_MAX) return lies("the name of an object");
        // A parent is there before its child: so no chain is a ring.
        if (o.parent != kNone && o.parent_generation >= o.generation) return lies("the parent of an object");
        if (o.soft_left_ms > o.soft_ms) return lies("a soft pin");
        if (o.extent.size != 0) extents.push_back(o.extent);
    }
    std::ranges::sort(slots);
    if (std::ranges::adjacent_find(slots, {}, &Slots::value_type::first) != slots.end())
        return lies("two objects in one slot");
    std::vector<Extent> not_leased = extents;
    not_leased.insert(not_leased.end(), pool.absent.begin(), pool.absent.end());
    if (!disjoint(not_leased, end)) return lies("objects where there is no memory");
    std::vector<Extent> taken = leases;
    taken.insert(taken.end(), pool.absent.begin(), pool.absent.end());
    if (!disjoint(extents, end)) return lies("objects that overlap, or lie outside of their arena");
    if (!disjoint(taken, end)) return lies("leases that overlap, or lie outside of their arena");
    // An object lies in a lease as a whole, or outside of all.
    size_t at = 0;
    for (const Extent& extent : extents) {
        while (at < taken.size() && taken[at].end() <= extent.offset) ++at;
        if (at == taken.size() || taken[at].offset >= extent.end()) continue;
        if (extent.offset < taken[at].offset || extent.end() > taken[at].end())
            return lies("an object that lies across a lease");
    }
    return slots;
}

}  // namespace

std::vector<std::byte> HandedNode::write() const {
    std::vector<std::byte> bytes(kHeadBytes);
    Out out(bytes);
    visit_node(out, *this);
    std::vector<std::byte> head;
    Writer w(head);
    w.number(kHandedMagic);
    w.number(kHandedVersion);
    w.number(static_cast<uint64_t>(bytes.size() - kHeadBytes));
    w.number(crc32c(0, bytes.data() + kHeadBytes, bytes.size() - kHeadBytes));
    w.number(uint32_t{0});
    std::memcpy(bytes.data(), head.data(), kHeadBytes);
    return bytes;
}

Result<HandedNode> HandedNode::read(std::span<const std::byte> bytes) {
    Reader head(bytes.first(std::min(bytes.size(), kHeadBytes)));
    auto magic = head.number<uint32_t>();
    auto version = head.number<uint32_t>();
    auto size = head.number<uint64_t>();
    auto crc = head.number<uint32_t>();
    head.number<uint32_t>();
    if (!head.ok() || magic != kHandedMagic) return lies("it is none");
    if (version != kHandedVersion) {
        return Error{Code::kProtocol, "the running node describes itself in version " +
                                          std::to_string(version) + ", and this release reads version " +
                                          std::to_string(kHandedVersion) +
                                          "; stop the running node and start this one"};
    }
    std::span<const std::byte> body = bytes.subspan(kHeadBytes);
    if (size != body.size()) return lies("it is cut off");
    if (crc != crc32c(0, body.data(), body.size())) return lies("its checksum");
    HandedNode node;
    In in(body);
    visit_node(in, node);
    if (!in.done()) return lies("a length in it");
    if (Status status = node.check(); !status) return status.error();
    return node;
}

Status HandedNode::check() const {
    if (ranges.empty() || pools.empty() || tcp_sockets > 64) return lies("its parts");
    std::unordered_map<std::string, std::vector<Extent>> leases;
    for (const HandedConnection& c : connections) {
        if (!c.proved && (!c.leases.empty() || !c.pins.empty() || !c.spaces.empty() || c.remote))
            return lies("a connection without proof that holds something");
        if (c.access.role > TenantRole::kAdmin) return lies("the role of a connection");
        std::vector<Extent>& of_tenant = leases[c.tenant];
        of_tenant.insert(of_tenant.end(), c.leases.begin(), c.leases.end());
    }
    std::unordered_map<std::string, Slots> tables;
    for (const HandedPool& pool : pools) {
        Result<Slots> slots = check_pool(pool, leases[pool.tenant]);
        if (!slots) return slots.error();
        if (!tables.emplace(pool.tenant, std::move(*slots)).second) return lies("two tenants of one name");
    }
    for (const HandedConnection& c : connections) {
        if (!c.proved) continue;
        auto table = tables.find(c.tenant);
        auto pool = std::ranges::find(pools, c.tenant, &HandedPool::tenant);
        if (table == tables.end()) return lies("the tenant of a connection");
        for (uint32_t space : c.spaces) {
            if (!std::ranges::any_of(pool->spaces, [&](const HandedSpace& s) { return s.id == space; }))
                return lies("the space of a connection");
        }
        for (const auto& [id, pinned] : c.pins) {
            if (id == 0 || id >= next_pin) return lies("the number of a pin");
            for (const HandedPin& pin : pinned) {
                std::pair<uint32_t, uint64_t> object(pin.slot, pin.generation);
                if (!std::ranges::binary_search(table->second, object)) return lies("a pin of no object");
            }
        }
    }
    return success();
}

}  // namespace moonpool
