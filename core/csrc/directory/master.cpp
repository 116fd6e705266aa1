// Composes the three parts of the master's knowledge: Directory (which node holds what), Membership (which
// nodes there are), Tombstones (what was removed while a node that may hold it was out of touch). A seat
// joins them: one for each current incarnation, made by its join and cleared when it leaves, is replaced or
// is gone.
//
// The rule behind join(), delta() and forget(): no client is sent to a copy that was removed. A node in
// touch hears of a removal from the client that removes. For any other node the key becomes a tombstone and
// a drop: the tombstone refuses the key in the node's next inventory, and the drop tells the node to delete
// the copy, again and again until it confirms.
//
// All of it runs on the master's loop; every time is an argument.
#include "directory/master.hpp"

#include <algorithm>
#include <cstring>

#include "directory/protocol.hpp"

namespace moonpool {

namespace {

// How many keys ahead their memory is asked for: a table of a million keys does not fit into the cache.
constexpr size_t kAhead = 16;

}  // namespace

Master::Master(const MasterLimits& limits, uint64_t now_ms)
    : limits_(limits),
      started_ms_(now_ms),
      directory_(limits.rows_max),
      membership_(limits.membership),
      tombstones_(limits.tombstones_max) {}

Result<Master::JoinAnswer> Master::join(uint64_t now_ms, const NodeIdentity& identity, const NodeLoad& load,
                                        LinkId link) {
    Result<Membership::Joined> joined =
        membership_.join(now_ms, identity, load, link, [this](NodeId id) { return directory_.is_free(id); });
    if (!joined) {
        ++counters_.joins_refused_total;
        return joined.error();
    }
    ++counters_.joins_total;
    // Before the new seat: the tombstones that clear_seat() makes are those that the new incarnation is
    // compared with.
    if (joined->replaced) clear_seat(now_ms, *joined->replaced);
    // The same process over a new connection: its rows still count, and it repeats its inventory. What it
    // has not confirmed to have dropped may be in that inventory, so these keys become tombstones again.
    if (joined->resumed) {
        forget_again(now_ms, seats_.at(joined->id).drops);
    } else {
        directory_.open(joined->id);
        seats_.emplace(joined->id, Seat{DropList(limits_.drops_max)});
    }
    Seat& seat = seats_.at(joined->id);
    // Only removals after this time concern the node: it heard of the earlier ones itself. 0 for a node
    // that is not remembered: all tombstones concern it.
    seat.away_since_ms = joined->heard_ms.value_or(0);
    seat.settled = false;
    // Tombstones are bounded and expire. When some of that time may be missing, the node has to drop
    // everything.
    if (!tombstones_.covers(seat.away_since_ms)) {
        seat.drops.push_all();
        ++counters_.drop_alls_total;
    }
    return JoinAnswer{joined->id, joined->resumed, joined->old_link};
}

// An incarnation that still owed a drop of everything leaves no list of keys to remember; so no later
// absence is covered by the tombstones until now (lose).
void Master::clear_seat(uint64_t now_ms, NodeId id) {
    directory_.close(id);
    const DropList& drops = seats_.at(id).drops;
    if (drops.all()) tombstones_.lose(now_ms);
    forget_again(now_ms, drops);
    seats_.erase(id);
}

// What an incarnation was told to drop and has not confirmed is void for whatever comes after it, too.
void Master::forget_again(uint64_t now_ms, const DropList& drops) {
    for (const Hash128& hash : drops.hashes()) tombstones_.add(now_ms, hash);
}

void Master::disconnected(NodeId id, LinkId link) {
    // A node that came back over another connection is alive; the end of the old one says nothing.
    if (membership_.link(id) != link) return;
    if (membership_.alive(id)) ++counters_.suspicions_total;
    membership_.disconnected(id, link);
}

void Master::left(uint64_t now_ms, NodeId id, LinkId link) {
    if (!membership_.left(now_ms, id, link)) return;
    clear_seat(now_ms, id);
    ++counters_.nodes_left_total;
}

// In touch: alive, and its inventory is complete. Such a node's rows are exact, but for what is on its way.
bool Master::in_touch(NodeId id) const {
    auto it = seats_.find(id);
    return it != seats_.end() && it->second.settled && membership_.alive(id);
}

bool Master::delta(uint64_t now_ms, NodeId id, LinkId link, uint8_t flags, std::string_view rows) {
    membership_.heard(now_ms, id, link);
    Seat& seat = seats_.at(id);
    if ((flags & kDeltaBegin) != 0) {
        directory_.begin_inventory(id);
        ++counters_.inventories_total;
    }
    // Once settled, a row that is added is a new object, stored after the removal; before, it may be the
    // removed copy.
    bool compare = !seat.settled && tombstones_.size() != 0;
    for (size_t at = 0; at < rows.size(); at += kDeltaRowBytes) {
        size_t ahead = at + kAhead * kDeltaRowBytes;
        if (ahead < rows.size()) directory_.prefetch(hash_at(rows.data() + ahead));
        std::optional<DeltaRow> row = row_at(rows.data() + at);
        if (!row) return false;
        if (!row->added) {
            counters_.rows_removed_total += directory_.remove(row->hash, id, row->tier);
        } else if (compare && tombstones_.has(row->hash, seat.away_since_ms)) {
            seat.drops.push(row->hash);
            ++counters_.drops_total;
        } else {
            counters_.rows_added_total += directory_.add(row->hash, id, row->tier);
        }
    }
    if ((flags & kDeltaEnd) != 0) {
        directory_.end_inventory(id);
        seat.settled = true;
    }
    return true;
}

void Master::beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load, uint64_t drops_done) {
    ++counters_.beats_total;
    membership_.beat(now_ms, id, link, load);
    seats_.at(id).drops.confirm(drops_done);
}

void Master::locate(std::string_view hashes, uint8_t flags, uint8_t holders_max, uint32_t width,
                    Writer& out) {
    bool prefix = (flags & kLocatePrefix) != 0;
    bool suspects = (flags & kLocateSuspects) != 0;
    // The count of holders has 8 bits on the wire.
    size_t limit = holders_max == 0 ? 255 : holders_max;
    size_t n = hashes.size() / sizeof(Hash128);
    size_t count_at = out.position();
    out.number(uint32_t{0});
    uint32_t answered = 0;
    size_t whole_blocks_end = out.position();
    width = std::max<uint32_t>(width, 1);
    for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) directory_.prefetch(hash_at(hashes.data() + (i + kAhead) * sizeof(Hash128)));
        found_.clear();
        directory_.find(hash_at(hashes.data() + i * sizeof(Hash128)), [&](Holder holder) {
            if (suspects || membership_.alive(holder.node)) found_.push_back(holder);
        });
        // The first key without a holder ends a prefix. Keys behind it are not looked at, which is what
        // makes long prompts cheap.
        if (found_.empty() && prefix) break;
        if (found_.size() > 1) {
            std::sort(found_.begin(), found_.end(), [](const Holder& a, const Holder& b) {
                return a.tier != b.tier ? a.tier < b.tier : a.node < b.node;
            });
        }
        counters_.locate_hits_total += !found_.empty();
        size_t holders = std::min(found_.size(), limit);
        out.number(static_cast<uint8_t>(holders));
        for (size_t k = 0; k < holders; ++k) {
            out.number(found_[k].node);
            out.number(static_cast<uint8_t>(found_[k].tier));
        }
        ++answered;
        if (answered % width == 0) whole_blocks_end = out.position();
    }
    if (prefix) {
        answered = answered / width * width;
        out.cut(whole_blocks_end);
    }
    counters_.locate_keys_total += n;
    out.number_at(count_at, answered);
}

std::vector<NodeId> Master::place(std::string_view tenant, uint64_t bytes, size_t n,
                                  const std::vector<NodeId>& avoid_nodes,
                                  const std::vector<std::string_view>& avoid_hosts, bool evict) {
    std::vector<NodeId> chosen = membership_.place(tenant, bytes, n, avoid_nodes, avoid_hosts, evict);
    ++counters_.places_total;
    counters_.places_short_total += chosen.size() < n;
    return chosen;
}

// found_ is copied out before rows are removed, since removal moves rows of the run that find() walks
// along.
uint32_t Master::forget(uint64_t now_ms, std::string_view hashes, std::span<const NodeId> unreached) {
    uint32_t rows = 0;
    for (size_t at = 0; at < hashes.size(); at += sizeof(Hash128)) {
        Hash128 hash = hash_at(hashes.data() + at);
        ++counters_.forgets_total;
        tombstones_.add(now_ms, hash);
        found_.clear();
        directory_.find(hash, [&](Holder holder) { found_.push_back(holder); });
        for (const Holder& holder : found_) {
            bool told = std::find(unreached.begin(), unreached.end(), holder.node) == unreached.end();
            if (told && in_touch(holder.node)) continue;
            if (!directory_.remove(hash, holder.node)) continue;  // in another tier, just now
            seats_.at(holder.node).drops.push(hash);
            ++counters_.drops_total;
            ++rows;
        }
    }
    return rows;
}

void Master::tick(uint64_t now_ms) {
    size_t suspects = membership_.suspects();
    std::vector<NodeId> gone = membership_.tick(now_ms);
    for (NodeId id : gone) clear_seat(now_ms, id);
    counters_.nodes_gone_total += gone.size();
    size_t suspects_now = membership_.suspects() + gone.size();
    if (suspects_now > suspects) counters_.suspicions_total += suspects_now - suspects;
    if (tombstones_.size() == 0 || now_ms - pruned_ms_ < limits_.tombstones_ms / 10) return;
    pruned_ms_ = now_ms;
    // A tombstone may go only when no absent node could bring its key back: every remembered node is here
    // and settled.
    if (all_here(now_ms) && now_ms > limits_.tombstones_ms) tombstones_.prune(now_ms - limits_.tombstones_ms);
}

// Right after a start the master does not know whom it does not know; grace_ms gives every node the time to
// join.
bool Master::all_here(uint64_t now_ms) const {
    if (now_ms - started_ms_ < limits_.grace_ms) return false;
    bool settled = std::all_of(seats_.begin(), seats_.end(), [](const auto& s) { return s.second.settled; });
    return settled && membership_.all_here();
}

bool Master::filling(uint64_t now_ms) const {
    return now_ms - started_ms_ < limits_.grace_ms || std::ranges::any_of(seats_, [this](const auto& seat) {
               return !seat.second.settled && membership_.alive(seat.first);
           });
}

bool Master::check_integrity() const {
    Members members = membership_.current(0);
    if (members.rows.size() != seats_.size()) return false;
    for (const Member& member : members.rows) {
        if (!seats_.contains(member.id)) return false;
    }
    return directory_.check_integrity() && membership_.check_integrity() && tombstones_.check_integrity();
}

}  // namespace moonpool
