#include "store/node/outgoing_objects.hpp"

#include <algorithm>
#include <utility>

#include "store/node/removals.hpp"
#include "store/node/server.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kHoldingsPerPiece = 4096;  // others wait meanwhile, some 0.1 ms

// A group as other nodes know it: its own name is not kept. The members stay together there, too.
std::string group_name(const Hash128& group) {
    if (group == Hash128{}) return {};
    std::string name = "copied ";
    constexpr std::string_view kDigits = "0123456789abcdef";
    for (uint64_t half : {group.high, group.low}) {
        for (int shift = 60; shift >= 0; shift -= 4) name.push_back(kDigits[(half >> shift) & 15]);
    }
    return name;
}

}  // namespace

void OutgoingObjects::hold(Pool& pool, std::span<const HoldingRow> rows, const Removals& removals) {
    pool_ = &pool;
    rows_ = rows.size();
    ObjectTable& table = pool.table();
    for (size_t i = 0; i < rows.size(); ++i) {
        const HoldingRow& row = rows[i];
        if (!table.committed(row.slot) || table.generation(row.slot) != row.generation) continue;
        const IndexEntry& entry = table.entry(row.slot);
        if (entry.space != rows.front().space) continue;
        table.retain(row.slot);
        held_.push_back({row.slot, row.generation});
        identity_ = pool.unsalted_identity(entry.space);
        RetentionHints hints = table.hints(row.slot);
        // What is here now has outlived all removals of its range that the node has carried out, and those
        // that its put came after: a replacement may be newer than what the node was told of.
        const Hash128 hash{entry.hash_low, entry.hash_high};
        Version applied = removals.applied(range_of(hash, removals.ranges()));
        Version after = applied == kNoVersion ? kNoVersion : std::max(applied, table.version(row.slot));
        objects_.push_back({.row = i,
                            .name = std::string(table.name(row.slot)),
                            .parent = std::string(table.parent_name(row.slot)),
                            .group = group_name(hints.group),
                            .soft_ms = hints.soft_ms,
                            .crc = entry.crc,
                            .after = after,
                            .bytes = MemoryRef::host(pool.data() + entry.offset, entry.size)});
    }
}

OutgoingObjects::~OutgoingObjects() {
    if (held_.empty()) return;
    server_.post_if_running([pool = pool_, held = std::move(held_)] {
        for (const Held& each : held) pool->table().release(each.slot, each.generation);
    });
}

// A piece of the objects of one pool; the cursor is (its number << 32) + slot.
bool Server::holdings(uint64_t& cursor, std::vector<HoldingRow>& rows) {
    struct Piece {
        uint64_t cursor;
        std::vector<HoldingRow> rows;
    };
    auto piece = std::make_shared<Piece>(Piece{cursor, {}});
    bool ran = call_on_loop([this, piece] {
        auto number = static_cast<uint32_t>(piece->cursor >> 32);
        auto slot = static_cast<uint32_t>(piece->cursor);
        piece->cursor = 0;
        if (number >= pools_.size()) return;
        const Pool& pool = *std::next(pools_.begin(), number)->second;
        const ObjectTable& table = pool.table();
        const uint32_t end = std::min(table.slots_used(), slot + kHoldingsPerPiece);
        for (; slot < end; ++slot) {
            if (!table.committed(slot)) continue;
            const IndexEntry& entry = table.entry(slot);
            piece->rows.push_back(
                {number, slot, table.generation(slot), entry.size, table.last_used(slot), entry.space});
        }
        if (slot >= table.slots_used()) ++number, slot = 0;
        if (number < pools_.size()) piece->cursor = (uint64_t{number} << 32) + slot;
    });
    if (!ran) return false;
    cursor = piece->cursor;
    rows = std::move(piece->rows);
    return true;
}

std::shared_ptr<OutgoingObjects> Server::hold(std::vector<HoldingRow> rows) {
    auto outgoing = std::make_shared<OutgoingObjects>(*this);
    bool ran = call_on_loop([this, outgoing, rows = std::move(rows)] {
        if (rows.empty() || rows.front().pool >= pools_.size()) return;
        Pool& pool = *std::next(pools_.begin(), rows.front().pool)->second;
        outgoing->hold(pool, rows, removals_);
    });
    return ran ? outgoing : nullptr;
}

}  // namespace moonpool
