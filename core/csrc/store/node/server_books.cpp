// Server: counters and gauges.
#include <algorithm>

#include "store/node/connection.hpp"
#include "store/node/server.hpp"

namespace moonpool {

std::vector<std::pair<std::string, uint64_t>> Server::snapshot() {
    auto rows = std::make_shared<std::vector<std::pair<std::string, uint64_t>>>();
    bool ran = call_on_loop([this, rows] {
        *rows = gauges();
        add_tenant_gauges(*rows);
    });
    if (!ran) return {};
    // The member's numbers are atomics, or have a mutex of their own: they need no loop.
    if (member_ != nullptr) {
        for (auto& row : member_->gauges()) rows->push_back(std::move(row));
    }
    if (relay_ != nullptr) {
        for (auto& row : relay_->gauges()) rows->push_back(std::move(row));
    }
    return *rows;
}

std::optional<MemberAgent::State> Server::membership() const {
    if (member_ == nullptr) return std::nullopt;
    return member_->state();
}

// On the loop. Names are those of the metrics without their prefix; several tenants are summed up.
std::vector<std::pair<std::string, uint64_t>> Server::gauges() {
    NodeMetrics& m = metrics_;
    TableCounters sum;
    uint64_t capacity = 0, free_bytes = 0, leased = 0, pins = 0, arena = 0, huge = 0, remote_pinned = 0,
             spaces = 0, objects_max = 0;
    for (auto& [tenant, pool] : pools_) {
        const TableCounters& c = pool->table().counters();
        sum.objects += c.objects;
        sum.object_bytes += c.object_bytes;
        sum.detached += c.detached;
        sum.pinned += c.pinned;
        sum.pinned_bytes += c.pinned_bytes;
        remote_pinned += pool->remote_pins().bytes();
        spaces += pool->spaces();
        sum.evicted_total += c.evicted_total;
        sum.evicted_bytes_total += c.evicted_bytes_total;
        sum.evicted_for_slots_total += c.evicted_for_slots_total;
        objects_max += pool->table().objects_max();
        capacity += pool->capacity();
        free_bytes += pool->free_bytes();
        arena += pool->start_bytes();
        huge += pool->huge_bytes();
    }
    for (auto& [fd, connection] : connections_) {
        leased += connection->leased_bytes();
        pins += connection->pins();
    }
    struct {
        uint64_t refused = 0, auth_failures = 0, protocol_errors = 0, handshake_timeouts = 0;
    } door;
    if (listener_ != nullptr) {
        const ListenerCounters& c = listener_->counters();
        door = {c.refused_total, c.auth_failures_total, c.protocol_errors_total, c.handshake_timeouts_total};
    }
    std::vector<std::pair<std::string, uint64_t>> rows = {
        {"objects", sum.objects},
        {"objects_max", objects_max},
        {"object_bytes", sum.object_bytes},
        {"objects_pinned", sum.pinned},
        {"objects_detached", sum.detached},
        {"spaces", spaces},
        {"pins", pins},
        {"pinned_bytes", sum.pinned_bytes},
        {"remote_pinned_bytes", remote_pinned},
        {"pins_refused_total", m.pins_refused_total},
        {"pins_idle_total", m.pins_idle_total},
        {"arena_bytes", arena},
        {"arena_ready_bytes", capacity},
        {"arena_free_bytes", free_bytes},
        {"arena_huge_page_bytes", huge},
        {"arena_memory_short", memory_error_.load()},
        {"log_left_out_total", journal_->left_out_total()},
        {"leased_bytes", leased},
        {"connections", connections_.size()},
        {"remote_connections", remote_connections_},
        {"connections_max", connections_max_.now()},
        {"limits_raised_total", connections_max_.raised_total()},
        {"connections_total", m.connections_total},
        {"connections_refused_total", m.connections_refused_total + door.refused},
        {"connections_dropped_total", m.connections_dropped_total},
        {"connections_closed_total", m.connections_closed_total},
        {"auth_failures_total", m.auth_failures_total + door.auth_failures},
        {"protocol_errors_total", m.protocol_errors_total + door.protocol_errors},
        {"handshake_timeouts_total", m.handshake_timeouts_total + door.handshake_timeouts},
        {"stored_total", m.stored_total},
        {"stored_bytes_total", m.stored_bytes_total},
        {"exists_total", m.exists_total},
        {"put_refused_total", m.put_refused_total},
        {"lease_refused_total", m.lease_refused_total},
        {"lookup_keys_total", m.lookup_keys_total},
        {"lookup_hits_total", m.lookup_hits_total},
        {"served_total", m.served_total},
        {"served_bytes_total", m.served_bytes_total},
        {"removed_total", m.removed_total},
        {"evicted_total", sum.evicted_total},
        {"evicted_bytes_total", sum.evicted_bytes_total},
        {"evicted_for_slots_total", sum.evicted_for_slots_total},
        {"scrub_dropped_total", m.scrub_dropped_total},
        {"tcp_sent_bytes_total", m.tcp_sent_bytes_total},
        {"tcp_received_bytes_total", m.tcp_received_bytes_total},
        {"tcp_damaged_total", m.tcp_damaged_total},
    };
    if (ssd_ != nullptr) {
        for (auto& row : ssd_->gauges()) rows.push_back(std::move(row));
    }
    if (events_ != nullptr) {
        BlockEvents::Counters c = events_->counters();
        rows.emplace_back("events_blocks", c.blocks);
        rows.emplace_back("events_objects", c.objects);
        rows.emplace_back("events_objects_max", BlockEvents::kObjectsMax);
        rows.emplace_back("events_ignored_total", c.ignored_total);
        rows.emplace_back("events_overflows_total", c.overflows_total);
    }
    return rows;
}

// Of each tenant, where there are several or one has limits: kTenantsShown at most. A name that a label
// cannot have is left out, too.
void Server::add_tenant_gauges(std::vector<std::pair<std::string, uint64_t>>& rows) const {
    constexpr size_t kTenantsShown = 256;
    if (pools_.size() == 1 && shares_.empty()) return;
    size_t shown = 0;
    for (const auto& [tenant, pool] : pools_) {
        if (shown == kTenantsShown) break;
        if (tenant.find_first_of("\"\\") != tenant.npos) continue;
        ++shown;
        auto add = [&, of = "{tenant=\"" + tenant + "\"}"](const char* name, uint64_t value) {
            rows.emplace_back(name + of, value);
        };
        const TenantLimits& limits = pool->limits();
        const MemoryShares::Bounds* bounds = shares_.of(*pool);
        const Pool::ShareCounters& c = pool->share_counters();
        add("tenant_dram_bytes", pool->held_bytes());
        add("tenant_dram_used_bytes", pool->capacity() - pool->free_bytes());
        add("tenant_dram_min_bytes", bounds == nullptr ? pool->arena_bytes() : bounds->min);
        add("tenant_dram_max_bytes", bounds == nullptr ? pool->arena_bytes() : bounds->max);
        add("tenant_pinned_bytes", pool->table().counters().pinned_bytes);
        if (limits.pins_max) add("tenant_pins_max_bytes", *limits.pins_max);
        add("tenant_evicted_total", pool->table().counters().evicted_total);
        add("tenant_evicted_for_others_total", c.evicted);
        add("tenant_evicted_for_others_bytes_total", c.evicted_bytes);
        add("tenant_refused_total", c.refused);
        if (limits.bytes_per_s) add("tenant_bytes_per_s_max", *limits.bytes_per_s);
        add("tenant_over_rate_total", c.over_rate);
        if (ssd_ == nullptr) continue;
        add("tenant_ssd_bytes", ssd_->bytes_of(*pool));
        if (limits.ssd_max) add("tenant_ssd_max_bytes", *limits.ssd_max);
        add("tenant_ssd_dropped_total", ssd_->dropped_of(*pool));
    }
    rows.emplace_back("tenants", pools_.size());
    rows.emplace_back("tenants_shown", shown);
}

}  // namespace moonpool
