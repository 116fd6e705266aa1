// PlaceIndex: the nodes that bytes can be placed at, for each tenant in the order in which they are chosen,
// so that a choice does not look at all of them. Pure. It holds what it was given last for each node: a load
// that changes is told with what it was before.
//
// A node has *room* for what it can take before it evicts: its free bytes, less an eighth of its arena. A
// node that is nearly full evicts already.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "directory/types.hpp"

namespace moonpool {

class PlaceIndex {
   public:
    static uint64_t room(const TenantLoad& load) {
        return load.free_bytes - std::min(load.free_bytes, load.arena_bytes / 8);
    }
    static bool has_room(const TenantLoad& load, uint64_t bytes) {
        return load.free_bytes >= load.arena_bytes / 8 && room(load) >= bytes;
    }

    void add(NodeId id, const NodeLoad& load) {
        for (const TenantLoad& tenant : load.tenants) add(id, tenant);
    }
    void remove(NodeId id, const NodeLoad& load) {
        for (const TenantLoad& tenant : load.tenants) remove(id, tenant);
    }
    // With each beat: what is as it was stays where it is.
    void change(NodeId id, const NodeLoad& before, const NodeLoad& after) {
        bool same_tenants =
            std::ranges::equal(before.tenants, after.tenants, {}, &TenantLoad::tenant, &TenantLoad::tenant);
        if (!same_tenants) {
            remove(id, before);
            add(id, after);
            return;
        }
        for (size_t i = 0; i < after.tenants.size(); ++i) change(id, before.tenants[i], after.tenants[i]);
    }
    void change(NodeId id, const TenantLoad& before, const TenantLoad& after) {
        uint64_t rooms[] = {room(before), room(after)};
        if (rooms[0] == rooms[1] && before.oldest_age_ms == after.oldest_age_ms) return;
        auto orders = tenants_.find(after.tenant);
        if (orders == tenants_.end()) return;
        move(orders->second.by_room, {rooms[0], id}, {rooms[1], id});
        move(orders->second.by_age, {before.oldest_age_ms, id}, {after.oldest_age_ms, id});
    }

    // f(id) for the nodes that may have room for `bytes` more, most room first, then by number; false ends
    // it.
    template <class F>
    void most_room_first(std::string_view tenant, uint64_t bytes, F f) const {
        auto orders = tenants_.find(tenant);
        if (orders == tenants_.end()) return;
        for (const Place& place : orders->second.by_room) {
            if (place.rank < bytes || !f(place.id)) return;
        }
    }
    // The same for all nodes, those with the oldest blocks first.
    template <class F>
    void oldest_first(std::string_view tenant, F f) const {
        auto orders = tenants_.find(tenant);
        if (orders == tenants_.end()) return;
        for (const Place& place : orders->second.by_age) {
            if (!f(place.id)) return;
        }
    }

    friend bool operator==(const PlaceIndex&, const PlaceIndex&) = default;

   private:
    struct Place {
        uint64_t rank;
        NodeId id;
        bool operator<(const Place& other) const {
            return rank != other.rank ? rank > other.rank : id < other.id;
        }
        friend bool operator==(const Place&, const Place&) = default;
    };
    using Order = std::set<Place>;
    struct Orders {
        Order by_room, by_age;
        friend bool operator==(const Orders&, const Orders&) = default;
    };

    void add(NodeId id, const TenantLoad& load) {
        Orders& orders = tenants_[load.tenant];
        orders.by_room.insert({room(load), id});
        orders.by_age.insert({load.oldest_age_ms, id});
    }
    void remove(NodeId id, const TenantLoad& load) {
        auto orders = tenants_.find(load.tenant);
        if (orders == tenants_.end()) return;
        orders->second.by_room.erase({room(load), id});
        orders->second.by_age.erase({load.oldest_age_ms, id});
        if (orders->second.by_room.empty() && orders->second.by_age.empty()) tenants_.erase(orders);
    }
    static void move(Order& order, const Place& from, const Place& to) {
        if (from == to) return;
        auto place = order.extract(from);
        if (place.empty()) return;
        place.value() = to;
        order.insert(std::move(place));
    }

    std::map<std::string, Orders, std::less<>> tenants_;
};

}  // namespace moonpool
