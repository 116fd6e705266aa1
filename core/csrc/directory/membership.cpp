// What a JOIN comes to, by what is known of its (host_id, name):
//
//   nothing known                    a new member under a free number
//   the same incarnation             resumed: the same number, and its rows still count
//   another one, which is suspect    replaced: the old one ends, fenced; the new one gets a number of its own
//   another one, which is alive      refused: two processes have one name
//   an incarnation that was fenced   refused: another process took its place
//
// Every change that clients should know of moves epoch_. Times are the caller's; nothing here reads a clock.
//
// The master's loop alone calls. members_ has the current incarnations, past_ the ended ones in the order
// of their end, for as long as they are remembered; alive_ repeats the state as one bit for each number,
// since a look-up of keys asks for it for every holder. by_name_, places_ and free_ are indexes, so that
// neither JOIN nor PLACE walks over all members; a member is in by_change_ under its last change alone.
#include "directory/membership.hpp"

#include <algorithm>
#include <set>

namespace moonpool {

namespace {

bool same_member(const NodeIdentity& a, const NodeIdentity& b) {
    return a.host_id == b.host_id && a.name == b.name;
}

bool same_incarnation(const NodeIdentity& a, const NodeIdentity& b) {
    return same_member(a, b) && a.incarnation == b.incarnation;
}

bool prints(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Endpoints of KV events help proxies alone: where one is unfit, the node joins without both.
NodeIdentity with_fit_events(NodeIdentity who) {
    constexpr size_t kEndpointMax = 256;
    for (std::string_view text : {std::string_view(who.events), std::string_view(who.events_replay)}) {
        if (text.size() <= kEndpointMax && prints(text)) continue;
        who.events.clear();
        who.events_replay.clear();
        break;
    }
    return who;
}

}  // namespace

// Names go to logs, metrics and other nodes: bounded and printable. The socket path may have
// any bytes but control characters, and has to fit into a sockaddr_un.
std::string unfit_names(const NodeIdentity& who) {
    constexpr size_t kNameMax = 128, kHostMax = 256, kAddressMax = 300, kPathMax = 108;
    struct Row {
        const char* what;
        std::string_view text;
        size_t bytes_max;
    };
    const Row rows[] = {{"name (node.name)", who.name, kNameMax},
                        {"host id (node.host_id)", who.host_id, kHostMax},
                        {"address (node.advertise)", who.address, kAddressMax}};
    for (const Row& row : rows) {
        if (row.text.size() <= row.bytes_max && prints(row.text)) continue;
        return std::string("a node's ") + row.what + " must be at most " + std::to_string(row.bytes_max) +
               " printable ASCII characters; choose another";
    }
    if (who.name.empty()) return "a node needs a name (node.name)";
    bool path_prints = std::none_of(who.socket_path.begin(), who.socket_path.end(),
                                    [](char c) { return (c >= 0 && c < ' ') || c == 127; });
    if (who.socket_path.size() > kPathMax || !path_prints) {
        return "a node's socket path (node.socket) must be at most " + std::to_string(kPathMax) +
               " bytes without control characters; choose another";
    }
    return "";
}

std::optional<NodeId> Membership::find(const NodeIdentity& identity) const {
    auto it = by_name_.find(Name(identity.host_id, identity.name));
    return it == by_name_.end() ? std::nullopt : std::optional<NodeId>(it->second);
}

std::optional<uint64_t> Membership::last_heard(const NodeIdentity& identity) const {
    std::optional<uint64_t> last;
    for (const Past& past : past_) {
        if (same_member(past.identity, identity)) last = std::max(last.value_or(0), past.heard_ms);
    }
    return last;
}

// The lowest number that no member has and that the directory does not need any more (usable): rows of its
// former holder may wait to be swept. Low numbers keep tables by number small.
std::optional<NodeId> Membership::free_id(const std::function<bool(NodeId)>& usable) {
    auto freed = std::ranges::find_if(free_, usable);
    if (freed != free_.end()) return *freed;
    while (next_id_ < kNoNode) {
        auto id = static_cast<NodeId>(next_id_++);
        free_.insert(id);
        if (usable(id)) return id;
    }
    return std::nullopt;
}

// All checks come before the first change: a refused JOIN leaves everything as it was.
Result<Membership::Joined> Membership::join(uint64_t now_ms, const NodeIdentity& who, const NodeLoad& load,
                                            LinkId link, const std::function<bool(NodeId)>& usable) {
    const NodeIdentity identity = with_fit_events(who);
    if (std::string why = unfit_names(identity); !why.empty()) return Error{Code::kInvalidArgument, why};
    std::string whole_name = identity.name + " on host " + identity.host_id;
    for (const Past& past : past_) {
        if (past.fenced && same_incarnation(past.identity, identity)) {
            return Error{Code::kInvalidArgument, "another process took the place of the node " + whole_name +
                                                     "; end this one, or give it a name of its own"};
        }
    }
    Joined joined;
    std::optional<NodeId> known = find(identity);
    if (known) {
        CurrentMember& member = members_.at(*known);
        joined.heard_ms = heard_ms_[*known];
        // The caller closes it; it may be half open. From here on frames of that link are ignored (heard,
        // beat, left).
        joined.old_link = member.link;
        if (member.identity.incarnation == identity.incarnation) {
            joined.id = *known;
            joined.resumed = true;
            joined.was_alive = member.state == MemberState::kAlive;
            bool moved = member.identity != identity;  // its address may be another
            member.identity = identity;
            set_load(*known, member, load);
            member.link = link;
            heard_ms_[*known] = now_ms;
            set_state(*known, member, MemberState::kAlive);
            changed(*known, member, moved);
            return joined;
        }
        if (in_touch(member.state)) {
            return Error{Code::kInvalidArgument, "the node " + whole_name +
                                                     " is in the pool already, as another process; give each "
                                                     "node of a host a name of its own (node.name)"};
        }
    } else {
        joined.heard_ms = last_heard(identity);
        auto most = [this] { return options_.members_most; };
        if (limit_.admit(members_.size(), most) == SoftLimit::Answer::kFull) {
            return Error{Code::kTooLarge, "the pool already has " + std::to_string(members_.size()) +
                                              " nodes, as many as one master can number; start a pool of its "
                                              "own, with another master, for further nodes"};
        }
    }
    std::optional<NodeId> id = free_id(usable);
    if (!id) return Error{Code::kTooLarge, "every node number is in use; try again soon"};
    if (known) {
        joined.replaced = known;
        end(*known, true);
    }
    joined.id = *id;
    free_.erase(*id);
    by_name_.emplace(Name(identity.host_id, identity.name), *id);
    CurrentMember& member = members_.emplace(*id, {});
    member.identity = identity;
    member.load = load;
    member.link = link;
    if (heard_ms_.size() <= *id) heard_ms_.resize(size_t{*id} + 1, kNever);
    heard_ms_[*id] = now_ms;
    enter_state(*id, member, MemberState::kAlive);
    changed(*id, member, true);
    return joined;
}

// Fenced only when another incarnation took the place: a node that fell silent, or left, may come back as
// it was.
void Membership::end(NodeId id, bool fenced) {
    CurrentMember& member = members_.at(id);
    leave_state(id, member);
    by_change_.erase(member.changed_epoch);
    by_name_.erase(Name(member.identity.host_id, member.identity.name));
    free_.insert(id);
    ends_.emplace_back(++epoch_, id);
    if (ends_.size() > options_.ends_max) {
        ends_since_ = ends_.front().first;
        ends_.pop_front();
    }
    past_.push_back(Past{std::move(member.identity), heard_ms_[id], fenced});
    if (past_.size() > options_.past_max) past_.pop_front();
    members_.erase(id);
    heard_ms_[id] = kNever;
}

void Membership::set_state(NodeId id, CurrentMember& member, MemberState state) {
    if (state == MemberState::kAlive && member.joining) state = MemberState::kJoining;
    if (member.state == state) return;
    leave_state(id, member);
    enter_state(id, member, state);
    changed(id, member, false);
}

// Only what is alive is looked up and placed at.
void Membership::enter_state(NodeId id, CurrentMember& member, MemberState state) {
    member.state = state;
    suspects_ += state == MemberState::kSuspect;
    if (state != MemberState::kAlive) return;
    if (alive_.size() <= id) alive_.resize(size_t{id} + 1);
    alive_[id] = true;
    places_.add(id, member.load);
}

void Membership::leave_state(NodeId id, const CurrentMember& member) {
    suspects_ -= member.state == MemberState::kSuspect;
    if (member.state != MemberState::kAlive) return;
    alive_[id] = false;
    places_.remove(id, member.load);
}

void Membership::set_load(NodeId id, CurrentMember& member, const NodeLoad& load) {
    if (member.state == MemberState::kAlive) places_.change(id, member.load, load);
    member.load = load;
}

void Membership::changed(NodeId id, CurrentMember& member, bool moved) {
    by_change_.erase(member.changed_epoch);
    member.changed_epoch = ++epoch_;
    if (moved) member.moved_epoch = epoch_;
    by_change_.emplace_hint(by_change_.end(), epoch_, id);
}

std::optional<Membership::Changes> Membership::changes(uint64_t since) const {
    if (since < ends_since_ || since > epoch_) return std::nullopt;
    Changes changes;
    auto after = [&](const auto& end) { return end.first <= since; };
    for (auto end = std::ranges::partition_point(ends_, after); end != ends_.end(); ++end)
        changes.ended.push_back(end->second);
    for (auto it = by_change_.upper_bound(since); it != by_change_.end(); ++it) {
        bool moved = members_.at(it->second).moved_epoch > since;
        (moved ? changes.moved : changes.turned).push_back(it->second);
    }
    return changes;
}

void Membership::heard(uint64_t now_ms, NodeId id, LinkId link) {
    auto it = members_.find(id);
    if (it == members_.end() || it->second.link != link)
        return;  // an old connection of an incarnation that has moved
    heard_ms_[id] = now_ms;
    set_state(id, it->second, MemberState::kAlive);
}

void Membership::beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load) {
    heard(now_ms, id, link);
    auto it = members_.find(id);
    if (it != members_.end() && it->second.link == link) set_load(id, it->second, load);
}

void Membership::set_joining(NodeId id, bool joining) {
    auto it = members_.find(id);
    if (it == members_.end()) return;
    it->second.joining = joining;
    if (in_touch(it->second.state)) set_state(id, it->second, MemberState::kAlive);
}

MemberState Membership::state(NodeId id) const {
    auto it = members_.find(id);
    return it == members_.end() ? MemberState::kGone : it->second.state;
}

void Membership::disconnected(NodeId id, LinkId link) {
    auto it = members_.find(id);
    if (it == members_.end() || it->second.link != link) return;
    it->second.link = kNoLink;
    set_state(id, it->second, MemberState::kSuspect);
}

bool Membership::left(uint64_t now_ms, NodeId id, LinkId link) {
    auto it = members_.find(id);
    if (it == members_.end() || it->second.link != link) return false;
    heard_ms_[id] = now_ms;
    end(id, false);
    return true;
}

std::vector<NodeId> Membership::tick(uint64_t now_ms) {
    // When this process itself stood still (suspended, or swapped out), the members were not silent for it:
    // the time is credited to all of them, or every node would be suspect at once.
    uint64_t gap = now_ms - std::exchange(ticked_ms_, now_ms);
    std::vector<NodeId> gone;
    for (size_t i = 0; i < heard_ms_.size(); ++i) {
        uint64_t& heard_ms = heard_ms_[i];
        if (heard_ms == kNever) continue;
        // What they sent meanwhile waits to be read.
        if (gap > options_.suspect_ms / 2) heard_ms = std::min(now_ms, heard_ms + gap);
        uint64_t silent_ms = now_ms - std::min(now_ms, heard_ms);
        auto id = static_cast<NodeId>(i);
        if (silent_ms >= options_.suspect_ms) set_state(id, members_.at(id), MemberState::kSuspect);
        if (silent_ms >= options_.gone_ms) gone.push_back(id);
    }
    for (NodeId id : gone) end(id, false);
    // past_ is roughly in the order of heard_ms; an entry behind a younger one is kept a little longer.
    while (!past_.empty() && now_ms - std::min(now_ms, past_.front().heard_ms) >= options_.past_ms) {
        past_.pop_front();
    }
    return gone;
}

std::vector<NodeId> Membership::place(std::string_view tenant, uint64_t bytes, size_t n,
                                      const std::vector<NodeId>& avoid_nodes,
                                      const std::vector<std::string_view>& avoid_hosts, bool evict) {
    std::vector<NodeId> avoided = avoid_nodes;
    std::ranges::sort(avoided);
    std::set<std::string_view> hosts(avoid_hosts.begin(), avoid_hosts.end());  // also those of the chosen
    std::vector<NodeId> chosen;
    // The load is what the node said with its last beat. It is lowered by what is placed here, so that
    // several calls between two beats spread over the nodes.
    auto choose = [&](bool room) {
        return [&, room](NodeId id) {
            CurrentMember& member = members_.at(id);
            if (std::ranges::binary_search(avoided, id) || hosts.contains(member.identity.host_id))
                return true;
            const TenantLoad* load = member.load.find(tenant);
            if (load == nullptr || load->arena_bytes < bytes) return true;
            if (PlaceIndex::has_room(*load, bytes) != room) return true;
            hosts.insert(member.identity.host_id);
            chosen.push_back(id);
            return chosen.size() < n;
        };
    };
    // Free room first, the most of it; then where the oldest blocks are.
    if (n != 0) places_.most_room_first(tenant, bytes, choose(true));
    if (evict && chosen.size() < n) places_.oldest_first(tenant, choose(false));
    for (NodeId id : chosen) {
        auto* load = const_cast<TenantLoad*>(members_.at(id).load.find(tenant));
        TenantLoad before = *load;
        load->free_bytes -= std::min(bytes, load->free_bytes);
        places_.change(id, before, *load);
    }
    return chosen;
}

LinkId Membership::link(NodeId id) const {
    auto it = members_.find(id);
    return it == members_.end() ? kNoLink : it->second.link;
}

Member Membership::member(uint64_t now_ms, NodeId id) const {
    const CurrentMember& member = members_.at(id);
    return Member{id, member.state, member.identity, member.load, silent_ms(now_ms, id)};
}

uint64_t Membership::silent_ms(uint64_t now_ms, NodeId id) const {
    return now_ms - std::min(now_ms, heard_ms_[id]);
}

Members Membership::current(uint64_t now_ms) const {
    Members members;
    members.epoch = epoch_;
    members.rows.reserve(members_.size());
    for (const auto& [id, member] : members_) members.rows.push_back(this->member(now_ms, id));
    return members;
}

bool Membership::check_integrity() const {
    PlaceIndex places;
    size_t suspects = 0;
    if (by_name_.size() != members_.size() || by_change_.size() != members_.size()) return false;
    if (free_.size() + members_.size() != next_id_) return false;
    for (const auto& [id, member] : members_) {
        if (find(member.identity) != id) return false;  // one of each name
        auto change = by_change_.find(member.changed_epoch);
        if (change == by_change_.end() || change->second != id) return false;
        if (member.moved_epoch > member.changed_epoch || member.changed_epoch > epoch_) return false;
        if (free_.contains(id) || id >= next_id_ || heard_ms_[id] == kNever) return false;
        if (alive(id) != (member.state == MemberState::kAlive)) return false;
        if (alive(id)) places.add(id, member.load);
        suspects += member.state == MemberState::kSuspect;
        if (member.link == kNoLink && member.state != MemberState::kSuspect) return false;
        for (const Past& past : past_) {
            if (past.fenced && same_incarnation(past.identity, member.identity)) return false;
        }
    }
    for (size_t id = 0; id < heard_ms_.size(); ++id) {
        if (heard_ms_[id] != kNever && !members_.contains(static_cast<NodeId>(id))) return false;
    }
    for (size_t id = 0; id < alive_.size(); ++id) {
        if (alive_[id] && !members_.contains(static_cast<NodeId>(id))) return false;
    }
    return places == places_ && suspects == suspects_ && members_.size() <= limit_.now() &&
           past_.size() <= options_.past_max && ends_.size() <= options_.ends_max;
}

}  // namespace moonpool
