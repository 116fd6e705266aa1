// Composes the three parts of the master's knowledge: Directory (which node holds what), Membership (which
// nodes there are), RemovalLog (what was removed or replaced, in which order). A seat joins them: one for
// each current incarnation, made by its join and cleared when it leaves, is replaced or is gone.
//
// The rule: no client is sent to a copy that was removed, or replaced by a later one. order() gives a removal
// its place before any node is told of it. ordered(), or the client's end, voids the rows of all holders that
// were not told. From then on a row of a copy that was pushed without knowing of it (delta) is not taken, but
// for nodes that are known to know (Seat::told). Each of those nodes is told to drop what is older than that
// version, again and again until it confirms; if its copy turns out to be younger, it tells the row anew.
//
// A node that was away says up to which removal it is right (`applied`), and is sent what came after, before
// it is read again (kJoining). Its host, its name and how long it was away play no part. Where the log does
// not reach back so far, copies that are older than the log are void.
//
// All of it runs on the master's loop; every time is an argument.
#include "directory/master.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "directory/protocol.hpp"

namespace moonpool {

namespace {

// How many keys ahead their memory is asked for: a table of a million keys does not fit into the cache.
constexpr size_t kAhead = 16;

// Nodes that have yet to tell their inventory, as many as are told of each removal.
constexpr size_t kUnsettledMost = 16;

// A row that a node gathers with others is at most so late, and twice the time for which it gathers them.
constexpr uint64_t kRowLateMs = 200;

}  // namespace

Master::Master(const MasterLimits& limits, uint64_t now_ms, Version first, const Range& range)
    : limits_(limits),
      range_(range),
      started_ms_(now_ms),
      directory_(limits.rows_max),
      membership_(limits.membership),
      pace_(limits.pace),
      first_(first),
      version_(first),
      log_(limits.removals_max),
      told_early_(limits.removals_max) {}

Result<Master::JoinAnswer> Master::join(uint64_t now_ms, const NodeIdentity& identity, const NodeLoad& load,
                                        LinkId link, std::optional<Version> applied, bool recovered) {
    Result<Membership::Joined> joined =
        membership_.join(now_ms, identity, load, link, [this](NodeId id) { return directory_.is_free(id); });
    if (!joined) {
        ++counters_.joins_refused_total;
        return joined.error();
    }
    ++counters_.joins_total;
    if (joined->replaced) clear_seat(*joined->replaced);
    // The same process over a new connection: its rows still count, and it repeats its inventory.
    if (!joined->resumed) {
        directory_.open(joined->id);
        seats_.emplace(joined->id, Seat{joined->id, DropList(limits_.drops_max), identity.incarnation});
        numbers_[identity.incarnation] = joined->id;
    }
    Seat& seat = seats_.at(joined->id);
    seat.settled = false;
    seat.recovered = recovered;
    unsettled_.insert(joined->id);
    seat.versions = applied.has_value();
    if (!joined->resumed) seat.since_epoch = membership_.epoch();
    bool empty = applied == UINT64_MAX;
    seat.all_told_at = empty && !standby_ ? version_ : UINT64_MAX;
    if (applied && !empty) hear_version(*applied);
    seat.applied = empty ? closed() : applied.value_or(kNoVersion);
    seat.of_former = !empty && seat.applied < first_ ? seat.applied : UINT64_MAX;
    if (seat.of_former != UINT64_MAX) former_most_ = std::max(former_most_, seat.of_former);
    // What waits is among what comes now.
    seat.drops.clear();
    if (!empty && !standby_ && !log_.covers(seat.applied)) {
        seat.drops.push_all_before(log_.complete_since());
        owing_.insert(seat.id);
        ++counters_.drop_alls_total;
    }
    log_.each_after(seat.applied, [&](const Hash128& hash, const Removal& removal) {
        // One that is open voids the row at its end, as of any node: its client may be about to tell this
        // one.
        const Removal last = last_ended(hash, removal);
        if (!empty && last.place > seat.applied && !knows(seat, hash, last.place))
            drop(seat, hash, last.version);
        return false;
    });
    // A node that was never out of touch (another process of it has taken over) is no further behind than any
    // other that has yet to carry out what it was sent.
    bool is_behind = !joined->was_alive || joining_.contains(joined->id);
    seat.joined_when = is_behind ? seat.drops.end() : seat.drops.first();
    seem_joining(now_ms, joined->id, seat);
    return JoinAnswer{joined->id, joined->resumed, joined->old_link};
}

// A node that is behind is not read until it has carried out what it had missed. While a new master fills up
// it may not have heard of all of that: what a node brings from its disk may have been removed since, and the
// nodes that know join within a second.
void Master::seem_joining(uint64_t now_ms, NodeId id, Seat& seat) {
    bool behind = seat.drops.first() < seat.joined_when || seat.drops.all();
    bool unknown = new_for_ms(now_ms) != 0 && (seat.of_former < former_most_ ||
                                               (seat.recovered && age_ms(now_ms) < limits_.recovered_ms));
    bool joining = seat.versions && (behind || unknown);
    if (joining) joining_.insert(id);
    if (!joining) joining_.erase(id);
    membership_.set_joining(id, joining);
}

// A node may know a later version than this master has given: of another master, which has taken over; else a
// clock went back. A standby gives none.
void Master::hear_version(Version version) {
    if (standby_ || version <= version_) return;
    if (one_of_several_) {
        superseded_ = true;
    } else {
        go_on_behind(version);
    }
}

// What this master gave goes on behind that version.
void Master::go_on_behind(Version version) {
    std::vector<Hash128> mine;
    log_.each_after(first_, [&](const Hash128& hash, const Removal&) {
        mine.push_back(hash);
        return false;
    });
    open_.clear();
    before_open_.clear();
    version_ = version;
    for (const Hash128& hash : mine) {
        ++version_;
        add_removal(hash, version_, version_);
        void_copies(hash);
    }
}

template <class Is>
void Master::forget_placed(Is is) {
    for (auto placed = placed_.begin(); placed != placed_.end();) {
        std::erase_if(placed->second, is);
        placed = placed->second.empty() ? placed_.erase(placed) : std::next(placed);
    }
}

void Master::clear_seat(NodeId id) {
    directory_.close(id);
    if (auto seat = seats_.find(id); seat != seats_.end()) numbers_.erase(seat->second.incarnation);
    seats_.erase(id);
    owing_.erase(id);
    unsettled_.erase(id);
    joining_.erase(id);
    forget_placed([&](const Placed& p) { return p.node == id; });
}

void Master::disconnected(NodeId id, LinkId link) {
    // A node that came back over another connection is alive; the end of the old one says nothing.
    if (membership_.link(id) != link) return;
    if (membership_.alive(id)) ++counters_.suspicions_total;
    membership_.disconnected(id, link);
}

void Master::left(uint64_t now_ms, NodeId id, LinkId link) {
    if (!membership_.left(now_ms, id, link)) return;
    clear_seat(id);
    ++counters_.nodes_left_total;
}

// A node that was silent may have copies of which it has yet to tell. It counts so until it joins again.
void Master::hear_again(Seat& seat) {
    if (membership_.state(seat.id) == MemberState::kSuspect) seat.all_told_at = UINT64_MAX;
}

bool Master::delta(uint64_t now_ms, NodeId id, LinkId link, uint8_t flags, Version applied,
                   std::string_view rows) {
    Seat& seat = seats_.at(id);
    hear_again(seat);
    membership_.heard(now_ms, id, link);
    pace_.delta();
    if ((flags & kDeltaBegin) != 0) {
        directory_.begin_inventory(id);
        ++counters_.inventories_total;
    }
    // A node of the release before cannot say what its rows are checked against. Once it is settled, a row
    // that is added is a new object, stored after the removal; before, it may be the removed copy.
    bool compare = seat.versions ? log_.newest_place() > applied : !seat.settled && log_.size() != 0;
    for (size_t at = 0; at < rows.size(); at += kDeltaRowBytes) {
        size_t ahead = at + kAhead * kDeltaRowBytes;
        if (ahead < rows.size()) directory_.prefetch(hash_at(rows.data() + ahead));
        std::optional<DeltaRow> row = row_at(rows.data() + at);
        if (!row) return false;
        if (!range_.contains(row->hash)) {
            ++counters_.rows_void_total;
            continue;
        }
        if (!row->added) {
            bool removed = directory_.remove(row->hash, id, row->tier);
            ++(removed ? counters_.rows_removed_total : counters_.rows_void_total);
            continue;
        }
        if (compare) {
            const Removal removal = last_ended(row->hash);
            // Not by seat.applied: the row may have been pushed before that.
            auto told = seat.told.find(row->hash);
            bool known = told != seat.told.end() && told->second >= removal.place;
            if (removal.place > applied && !known && !spares(seat, removal)) {
                // Not certainly: of an earlier put, which the node has just carried out, the row is the same.
                const bool may_be_placed = is_placing(id, row->hash, removal.version);
                if (seat.versions || !may_be_placed) drop(seat, row->hash, removal.version);
                if (!may_be_placed) {
                    directory_.remove(row->hash, id);
                    ++counters_.rows_void_total;
                    continue;
                }
            }
        }
        counters_.rows_added_total += directory_.add(row->hash, id, row->tier);
    }
    if ((flags & kDeltaEnd) != 0) {
        directory_.end_inventory(id);
        seat.settled = true;
        unsettled_.erase(id);
        if (!standby_) seat.all_told_at = std::min(seat.all_told_at, version_);
    }
    return true;
}

void Master::beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load, uint64_t drops_done,
                  std::optional<Version> applied) {
    ++counters_.beats_total;
    Seat& seat = seats_.at(id);
    hear_again(seat);
    membership_.beat(now_ms, id, link, load);
    seat.drops.confirm(drops_done, [&](const Drop& drop) {
        Removal removal = log_.find(drop.hash);
        if (removal.version <= drop.version) know(seat, drop.hash, removal.place);
    });
    if (seat.drops.empty()) owing_.erase(id);
    apply(seat, applied);
    seem_joining(now_ms, id, seat);
}

void Master::know(Seat& seat, const Hash128& hash, Version place) {
    if (place <= seat.applied) return;
    Version& known = seat.told[hash];
    known = std::max(known, place);
}

bool Master::knows(const Seat& seat, const Hash128& hash, Version place) const {
    if (seat.applied >= place) return true;
    auto told = seat.told.find(hash);
    return told != seat.told.end() && told->second >= place;
}

bool Master::is_open(const Removal& removal) const {
    auto open = open_.upper_bound(removal.place);
    return open != open_.begin() && removal.place <= std::prev(open)->second.last;
}

// What a node's row is compared with. The end of a removal that is open voids the row, unless the client has
// told the node by then: told by the master before, the node would say to the client that it had no copy.
// removal: the last of that key.
Removal Master::last_ended(const Hash128& hash, const Removal& removal) const {
    if (!is_open(removal)) return removal;
    auto before = before_open_.find(hash);
    return before == before_open_.end() ? Removal{} : before->second;
}

// Before another removal of that key begins.
void Master::keep_last_ended(const Hash128& hash) {
    if (const Removal before = last_ended(hash); before.version != kNoVersion)
        before_open_.insert_or_assign(hash, before);
}

// What a node put since that was here, without a copy, when the removal was ordered.
bool Master::spares(const Seat& seat, const Removal& removal) const {
    return !standby_ && removal.of_absent && seat.all_told_at < removal.place && membership_.alive(seat.id);
}

// Whether the row may be of the replacement itself, of which ORDERED is on its way.
bool Master::is_placing(NodeId id, const Hash128& hash, Version version, bool here) const {
    auto placed = placed_.find(hash);
    return placed != placed_.end() && std::ranges::any_of(placed->second, [&](const Placed& p) {
               return p.node == id && p.version >= version && (p.here || !here);
           });
}

void Master::drop(Seat& seat, const Hash128& hash, Version version) {
    seat.drops.push({hash, version});
    owing_.insert(seat.id);
    ++counters_.drops_total;
}

void Master::apply(Seat& seat, std::optional<Version> applied) {
    if (!applied || *applied == UINT64_MAX || *applied <= seat.applied) return;
    hear_version(*applied);
    seat.applied = *applied;
    std::erase_if(seat.told, [&](const auto& told) { return told.second <= seat.applied; });
}

void Master::removals(uint64_t now_ms, NodeId id, LinkId link, Version complete_since,
                      std::span<const Drop> rows) {
    hear_again(seats_.at(id));
    membership_.heard(now_ms, id, link);
    // A standby hears them from its owner, and one that has taken over knows them all: but for those that
    // nodes had yet to tell the owner, which was new.
    if (new_for_ms(now_ms) == 0 && (standby_ || whole_)) return;
    if (standby_) {
        if (complete_since < first_) told_early_.lose(complete_since);
        for (const Drop& removal : rows) told_early_.add(removal.hash, removal.version);
        return;
    }
    if (complete_since < first_) log_.lose(complete_since);
    for (const Drop& removal : rows) {
        // Those that this master gave it knows.
        if (removal.version >= first_) continue;
        if (learn_removal(removal)) know(seats_.at(id), removal.hash, version_);
    }
}

// False: it is known.
bool Master::learn_removal(const Drop& removal) {
    if (!range_.contains(removal.hash) || log_.find(removal.hash).version >= removal.version) return false;
    ++version_;
    add_removal(removal.hash, removal.version, version_);
    void_copies(removal.hash);
    return true;
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
        find_holders(hash_at(hashes.data() + i * sizeof(Hash128)), suspects);
        // The first key without a holder ends a prefix. Keys behind it are not looked at, which is what
        // makes long prompts cheap.
        if (found_.empty() && prefix) break;
        write_found(limit, out);
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

void Master::find_holders(const Hash128& hash, bool suspects) {
    found_.clear();
    directory_.find(hash, [&](Holder holder) {
        if (suspects || membership_.alive(holder.node)) found_.push_back(holder);
    });
}

void Master::write_found(size_t limit, Writer& out) {
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
}

// Bytes that a client has put count as being put as long as their row may be on its way: an asker would look
// in vain for the node that has them.
Taken Master::taken(uint64_t now_ms, const Hash128& hash) {
    const Version removed = log_.find(hash).version;
    // The log is for what nodes may have that are away, or join. A key that it knows already may be under way
    // to a node that did not say so, or be there, and the node tells of it once more.
    bool may_be = removed != kNoVersion || membership_.suspects() != 0 || !owing_.empty() ||
                  filling(now_ms) || !unsettled_.empty();
    find_holders(hash, true);
    if (auto placed = placed_.find(hash); placed != placed_.end()) {
        // Another life of the node may have it, which joins when this one is silent for long enough.
        const uint64_t row_late_ms =
            kRowLateMs + limits_.membership.suspect_ms + 2 * uint64_t{pace_.batch_ms()};
        bool being_put = false;
        for (const Placed& p : placed->second) {
            if (p.version < removed || !seats_.contains(p.node)) continue;
            if (!membership_.alive(p.node)) {
                may_be = true;
                continue;
            }
            const bool has_row = std::ranges::find(found_, p.node, &Holder::node) != found_.end();
            being_put |= !p.here || (now_ms - p.at_ms < row_late_ms && !has_row);
        }
        if (being_put) return Taken::kBeingPut;
    }
    for (const Holder& holder : found_) {
        if (membership_.alive(holder.node)) return Taken::kHeld;
    }
    return may_be || !found_.empty() ? Taken::kFree : Taken::kNew;
}

Version Master::order(uint64_t now_ms, std::string_view hashes, NodeId placing, Writer& out,
                      std::vector<Taken>* taken) {
    size_t n = hashes.size() / sizeof(Hash128);
    Version first = version_ + 1;
    version_ += n;
    if (n != 0) {
        open_.emplace(first, Open{version_, now_ms});
        mirror_.open(first, version_);
    }
    out.number(static_cast<uint32_t>(n));
    for (size_t i = 0; i < n; ++i) {
        Hash128 hash = hash_at(hashes.data() + i * sizeof(Hash128));
        if (taken != nullptr && taken->emplace_back(this->taken(now_ms, hash)) != Taken::kFree) {
            out.number(uint8_t{0});
            if (taken->back() == Taken::kNew && seats_.contains(placing))
                place_at(hash, Placed{placing, first + i, now_ms});
            continue;
        }
        keep_last_ended(hash);
        // A node may have yet to carry out a put of a former place in the order.
        const bool of_absent = taken != nullptr && log_.find(hash).version == kNoVersion;
        add_removal(hash, first + i, first + i, of_absent);
        ++counters_.forgets_total;
        find_holders(hash, true);
        // Replacements of a moment ago, of which their nodes have not told yet; or they are still to come
        // there.
        if (auto placed = placed_.find(hash); placed != placed_.end()) {
            for (const Placed& p : placed->second) {
                bool found = std::ranges::find(found_, p.node, &Holder::node) != found_.end();
                if (!found && seats_.contains(p.node)) found_.push_back({p.node, Tier::kDram});
            }
        }
        // And what was removed before from nodes that have yet to drop it.
        for (NodeId node : owing_) {
            bool found = std::ranges::find(found_, node, &Holder::node) != found_.end();
            if (!found && seats_.at(node).drops.has(hash)) found_.push_back({node, Tier::kDram});
        }
        // And nodes that have yet to tell what they hold. Where there are many this master is new: clients
        // ask those that its predecessor knew.
        for (NodeId node : unsettled_) {
            if (unsettled_.size() > kUnsettledMost) break;
            bool found = std::ranges::find(found_, node, &Holder::node) != found_.end();
            if (!found && in_touch(membership_.state(node))) found_.push_back({node, Tier::kDram});
        }
        write_found(255, out);
        if (seats_.contains(placing)) place_at(hash, Placed{placing, first + i, now_ms});
    }
    return first;
}

void Master::add_removal(const Hash128& hash, Version version, Version place, bool of_absent) {
    log_.add(hash, version, place, of_absent);
    mirror_.removal(hash, Removal{version, place, of_absent});
}

// One of each node: its last.
void Master::place_at(const Hash128& hash, const Placed& placed) {
    std::vector<Placed>& all = placed_[hash];
    std::erase_if(all, [&](const Placed& p) { return p.node == placed.node; });
    all.push_back(placed);
    mirror_placed(hash, placed);
}

void Master::ordered(uint64_t now_ms, const Ordered& done, Writer& out) {
    size_t n = done.keys();
    out.number(static_cast<uint32_t>(n));
    // A former master gave those versions, and numbered nodes otherwise: which of them were told is not
    // known.
    bool of_former = done.first <= first_;
    for (size_t i = 0; of_former && i < n; ++i) {
        Hash128 hash = hash_at(done.hashes.data() + i * sizeof(Hash128));
        if (log_.find(hash).version >= done.first + i) continue;
        ++version_;
        add_removal(hash, done.first + i, version_);
        void_copies(hash);
    }
    if (!of_former) {
        Ordered current = done;
        // A number may be another life's by now.
        for (NodeId& node : current.nodes) {
            auto seat = seats_.find(node);
            if (seat == seats_.end() || seat->second.since_epoch > done.epoch) node = kNoNode;
        }
        end_order(current, now_ms);
        mirror_ended(current);
    }
    for (size_t i = 0; i < n; ++i) {
        Hash128 hash = hash_at(done.hashes.data() + i * sizeof(Hash128));
        out.number(std::max(log_.find(hash).version, done.first + i));
    }
}

void Master::end_order(const Ordered& done, uint64_t now_ms) {
    size_t n = done.keys();
    for (size_t i = 0; i < n; ++i) {
        Hash128 hash = hash_at(done.hashes.data() + i * sizeof(Hash128));
        Version version = done.first + i;
        for (size_t k = 0; k < done.nodes.size(); ++k) {
            NodeId node = done.nodes[k];
            if (node == kNoNode) continue;
            if (done.is_told(i, k)) know(seats_.at(node), hash, version);
            if (done.is_placed(i, k)) placed_[hash].push_back(Placed{node, version, now_ms, true});
        }
        if (auto placed = placed_.find(hash); placed != placed_.end()) {
            // What was to be put and was not, and what is replaced where the node knows that.
            std::erase_if(placed->second, [&](const Placed& p) {
                if (p.here && p.version >= version) return false;
                auto seat = seats_.find(p.node);
                return p.version == version || seat == seats_.end() ||
                       (p.version < version && knows(seat->second, hash, version));
            });
            if (placed->second.empty()) placed_.erase(placed);
        }
        if (const Removal last = log_.find(hash); last.version <= version) {
            before_open_.erase(hash);
        } else if (auto before = before_open_.find(hash);
                   is_open(last) && (before == before_open_.end() || before->second.version < version)) {
            before_open_.insert_or_assign(hash, Removal{version, version});
        }
        if (log_.find(hash).version >= version) void_copies(hash);  // else it has removed nothing
    }
    auto open = open_.find(done.first);
    if (open != open_.end() && open->second.last + 1 == done.first + n) open_.erase(open);
}

Version Master::closed() const {
    if (standby_) return closed_of_owner_;
    return mirror_.attached() ? std::min(closed_here(), mirror_.closed_heard()) : closed_here();
}

Version Master::closed_here() const { return open_.empty() ? version_ : open_.begin()->first - 1; }

// Rows of nodes that do not know of that removal are void, and these nodes are told. found_ is copied out
// before rows are removed, since removal moves rows of the run that find() walks along.
void Master::void_copies(const Hash128& hash) {
    Removal removal = log_.find(hash);
    found_.clear();
    directory_.find(hash, [&](Holder holder) { found_.push_back(holder); });
    for (const Holder& holder : found_) {
        Seat& seat = seats_.at(holder.node);
        if (knows(seat, hash, removal.place) || spares(seat, removal)) continue;
        if (is_placing(holder.node, hash, removal.version, true)) {  // the node keeps that one
            drop(seat, hash, removal.version);
            continue;
        }
        // False: in another tier, just now.
        if (directory_.remove(hash, holder.node)) drop(seat, hash, removal.version);
    }
}

std::vector<NodeId> Master::place(std::string_view tenant, uint64_t bytes, size_t n,
                                  const std::vector<NodeId>& avoid_nodes,
                                  const std::vector<std::string_view>& avoid_hosts, bool evict) {
    std::vector<NodeId> chosen = membership_.place(tenant, bytes, n, avoid_nodes, avoid_hosts, evict);
    ++counters_.places_total;
    counters_.places_short_total += chosen.size() < n;
    return chosen;
}

uint32_t Master::forget(uint64_t, std::string_view hashes, std::span<const NodeId> unreached) {
    uint64_t before = counters_.drops_total;
    for (size_t at = 0; at < hashes.size(); at += sizeof(Hash128)) {
        Hash128 hash = hash_at(hashes.data() + at);
        ++counters_.forgets_total;
        ++version_;
        add_removal(hash, version_, version_);
        directory_.find(hash, [&](Holder holder) {
            bool told = std::ranges::find(unreached, holder.node) == unreached.end();
            Seat& seat = seats_.at(holder.node);
            if (told && seat.settled && membership_.alive(holder.node)) know(seat, hash, version_);
        });
        void_copies(hash);
    }
    return static_cast<uint32_t>(counters_.drops_total - before);
}

void Master::tick(uint64_t now_ms) {
    pace_.tick(now_ms);
    size_t suspects = membership_.suspects();
    std::vector<NodeId> gone = membership_.tick(now_ms);
    for (NodeId id : gone) clear_seat(id);
    counters_.nodes_gone_total += gone.size();
    size_t suspects_now = membership_.suspects() + gone.size();
    if (suspects_now > suspects) counters_.suspicions_total += suspects_now - suspects;
    // A client that began a removal is gone: it counts as carried out, and no node as told.
    // A standby hears of that, too.
    while (!standby_ && !open_.empty() && now_ms - open_.begin()->second.at_ms >= limits_.order_ms) {
        auto [first, open] = *open_.begin();
        open_.erase(open_.begin());
        ++counters_.orders_expired_total;
        std::vector<Hash128> late;
        log_.each_after(first - 1, [&](const Hash128& hash, const Removal& removal) {
            if (removal.place > open.last) return true;
            late.push_back(hash);
            return false;
        });
        for (const Hash128& hash : late) {
            before_open_.erase(hash);
            void_copies(hash);
        }
    }
    if (open_.empty()) before_open_.clear();
    if (new_for_ms(now_ms) == 0) told_early_ = RemovalLog(limits_.removals_max);
    forget_placed([&](const Placed& p) { return now_ms - p.at_ms >= limits_.placed_ms; });
    if (new_for_ms(now_ms) != 0) {
        for (auto& [id, seat] : seats_) seem_joining(now_ms, id, seat);
    } else {  // no other node may be behind
        std::vector<NodeId> behind(joining_.begin(), joining_.end());
        behind.insert(behind.end(), owing_.begin(), owing_.end());
        for (NodeId id : behind) seem_joining(now_ms, id, seats_.at(id));
    }
}

// A standby that followed its owner only a moment ago has yet to hear of nodes that the owner knew.
uint64_t Master::age_ms(uint64_t now_ms) const {
    return now_ms - std::max(started_ms_, joinable_ms_.value_or(0));
}

uint64_t Master::new_for_ms(uint64_t now_ms) const {
    return limits_.grace_ms - std::min<uint64_t>(age_ms(now_ms), limits_.grace_ms);
}

bool Master::filling(uint64_t now_ms) const {
    return new_for_ms(now_ms) != 0 ||
           std::ranges::any_of(unsettled_, [this](NodeId id) { return in_touch(membership_.state(id)); });
}

size_t Master::told() const {
    size_t n = 0;
    for (const auto& [id, seat] : seats_) n += membership_.alive(id) && !unsettled_.contains(id);
    return n;
}

bool Master::check_integrity() const {
    Members members = membership_.current(0);
    if (members.rows.size() != seats_.size()) return false;
    for (const Member& member : members.rows) {
        auto seat = seats_.find(member.id);
        if (seat == seats_.end() || seat->second.settled == unsettled_.contains(member.id)) return false;
    }
    return directory_.check_integrity() && membership_.check_integrity() && log_.check_integrity();
}

}  // namespace moonpool
