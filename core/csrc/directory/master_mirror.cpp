// Master, as the owner of a standby and as a standby. See mirror.hpp.
//
// A standby is a Master that orders nothing. Nodes join it and tell it what they hold, as they tell the
// owner; the removals, their places and their ends come from the owner, so a row is void here where it is
// void there. When a frame of the owner says that a removal is closed, every row is void whose node is not
// known to know it: a node that hears of that from the owner hears of it later than the standby
// (Mirror::closed_heard), so what a node says of itself cannot hide a copy that the standby has yet to void.
#include <algorithm>
#include <utility>

#include "directory/master.hpp"
#include "directory/protocol.hpp"

namespace moonpool {

namespace {

constexpr size_t kMirrorBytes = 1u << 20;  // of the records in one frame

}  // namespace

// ---- The owner

MirrorHead Master::mirror_head(uint8_t flags) const {
    return {.flags = static_cast<uint8_t>(flags | kMirrorGives),
            .first = first_,
            .newest = version_,
            .closed = closed_here(),
            .complete_since = log_.complete_since()};
}

void Master::begin_mirror(const std::function<void(uint8_t flags)>& cut) {
    mirror_.attach(closed_here());
    one_of_several_ = true;
    uint8_t flags = kMirrorBegins;
    auto cut_some = [&] {
        if (mirror_.bytes() >= kMirrorBytes) cut(std::exchange(flags, uint8_t{0}));
    };
    log_.each_after(kNoVersion, [&](const Hash128& hash, const Removal& removal) {
        mirror_.removal(hash, removal);
        cut_some();
        return false;
    });
    for (const auto& [first, open] : open_) mirror_.open(first, open.last);
    for (const auto& [hash, all] : placed_) {
        for (const Placed& placed : all) mirror_placed(hash, placed);
        cut_some();
    }
    cut(flags | kMirrorWhole);
}

void Master::mirror_placed(const Hash128& hash, const Placed& placed) {
    if (auto seat = seats_.find(placed.node); seat != seats_.end())
        mirror_.placed(hash, seat->second.incarnation, placed.version, placed.here);
}

void Master::mirror_ended(const Ordered& done) {
    if (!mirror_.attached()) return;
    MirrorEnded ended{done, {}};
    for (NodeId node : done.nodes) {
        ended.nodes.push_back(node == kNoNode ? Incarnation{} : seats_.at(node).incarnation);
    }
    mirror_.ended(ended);
}

// ---- The standby

void Master::begin_to_follow(uint64_t now_ms) {
    while (seats_.size() != 0) {
        NodeId id = (*seats_.begin()).first;
        membership_.left(now_ms, id, membership_.link(id));
        clear_seat(id);
    }
    log_ = told_early_ = RemovalLog(limits_.removals_max);
    open_.clear();
    before_open_.clear();
    placed_.clear();
    mirror_.detach();
    standby_ = one_of_several_ = true;
    whole_ = superseded_ = false;
    joinable_ms_.reset();
    first_ = version_ = closed_of_owner_ = kNoVersion;
}

bool Master::follow(uint64_t now_ms, Reader frame) {
    followed_ms_ = now_ms;
    MirrorHead head = MirrorHead::read(frame);
    bool begins = (head.flags & kMirrorBegins) != 0;
    if (!frame.ok() || !standby_ || head.closed > head.newest) return false;
    if (begins) first_ = head.first;
    while (frame.left() != 0) {
        if (!follow_record(frame)) return false;
    }
    version_ = std::max(version_, head.newest);
    log_.lose(head.complete_since);
    whole_ |= (head.flags & kMirrorWhole) != 0;
    if (whole_ && !joinable_ms_) joinable_ms_ = now_ms;
    if (!whole_ || head.closed <= closed_of_owner_) return true;
    // Of those without an end the client is gone.
    while (!open_.empty() && open_.begin()->second.last <= head.closed) open_.erase(open_.begin());
    std::vector<Hash128> closed;
    log_.each_after(closed_of_owner_, [&](const Hash128& hash, const Removal& removal) {
        if (removal.place > head.closed) return true;
        closed.push_back(hash);
        return false;
    });
    for (const Hash128& hash : closed) {
        before_open_.erase(hash);
        void_copies(hash);
    }
    closed_of_owner_ = head.closed;
    return true;
}

bool Master::follow_record(Reader& r) {
    switch (static_cast<MirrorRecord>(r.number<uint8_t>())) {
        case MirrorRecord::kRemoval: {
            Hash128 hash = read_hash(r);
            auto version = r.number<Version>();
            auto place = r.number<Version>();
            bool of_absent = r.number<uint8_t>() != 0;
            if (r.ok()) keep_last_ended(hash);
            if (r.ok()) log_.add(hash, version, place, of_absent);
            return r.ok();
        }
        case MirrorRecord::kOpen: {
            auto first = r.number<Version>();
            auto last = r.number<Version>();
            if (r.ok() && first <= last) open_.emplace(first, Open{last, 0});
            return r.ok() && first <= last;
        }
        case MirrorRecord::kPlaced: {
            Hash128 hash = read_hash(r);
            Incarnation node{};
            std::string_view bytes = r.bytes(node.size());
            if (!r.ok()) return false;
            std::copy(bytes.begin(), bytes.end(), node.begin());
            Placed placed{kNoNode, r.number<Version>(), followed_ms_, r.number<uint8_t>() != 0};
            if (auto number = numbers_.find(node); number != numbers_.end()) placed.node = number->second;
            if (r.ok() && placed.node != kNoNode) place_at(hash, placed);
            return r.ok();
        }
        case MirrorRecord::kEnded:
            return follow_ended(r);
    }
    return false;
}

bool Master::follow_ended(Reader& r) {
    std::optional<MirrorEnded> ended = MirrorEnded::read(r);
    if (!ended) return false;
    for (size_t k = 0; k < ended->nodes.size(); ++k) {
        auto number = numbers_.find(ended->nodes[k]);
        if (number != numbers_.end()) ended->done.nodes[k] = number->second;
    }
    end_order(ended->done, followed_ms_);
    return true;
}

// The owner had not heard it.
void Master::learn_what_nodes_told() {
    log_.lose(told_early_.complete_since());
    told_early_.each_after(kNoVersion, [&](const Hash128& hash, const Removal& removal) {
        (void)learn_removal({hash, removal.version});
        return false;
    });
    told_early_ = RemovalLog(limits_.removals_max);
}

void Master::take_over(uint64_t now_ms, Version first, bool all_told) {
    if (!standby_) return;
    standby_ = superseded_ = false;
    one_of_several_ = true;
    // Later than all that the owner may have given since its last frame; one that hands over has given no
    // more. A master that is started anew begins with the time of day, which versions are not to run ahead
    // of.
    const Version ahead = all_told ? 1 : 1ull << 30;
    version_ = std::max(first, version_ + ahead);
    for (const auto& [id, seat] : seats_) version_ = std::max(version_, seat.applied);
    first_ = version_;
    // The nodes that had joined tell all that happens. One that did not know all begins as a new master does.
    if (!whole_) started_ms_ = now_ms;
    // It fills up no more.
    if (all_told) {
        started_ms_ = now_ms - std::min<uint64_t>(now_ms, limits_.grace_ms);
        joinable_ms_.reset();
    }
    if (!all_told) learn_what_nodes_told();
    // What was begun counts as carried out, and no node as told: the end of it may have been acknowledged.
    std::vector<Hash128> open;
    log_.each_after(closed_of_owner_, [&](const Hash128& hash, const Removal&) {
        open.push_back(hash);
        return false;
    });
    open_.clear();
    before_open_.clear();
    for (const Hash128& hash : open) void_copies(hash);
    for (auto& [id, seat] : seats_) {
        if (log_.covers(seat.applied)) continue;
        seat.drops.push_all_before(log_.complete_since());
        owing_.insert(id);
        ++counters_.drop_alls_total;
    }
}

}  // namespace moonpool
