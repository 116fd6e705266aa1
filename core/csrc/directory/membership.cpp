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
// since a look-up of keys asks for it for every holder.
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
    for (const auto& [id, member] : members_) {
        if (same_member(member.identity, identity)) return id;
    }
    return std::nullopt;
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
std::optional<NodeId> Membership::free_id(const std::function<bool(NodeId)>& usable) const {
    for (uint32_t id = 0; id < kNoNode; ++id) {
        auto candidate = static_cast<NodeId>(id);
        if (!members_.contains(candidate) && usable(candidate)) return candidate;
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
        joined.heard_ms = member.heard_ms;
        // The caller closes it; it may be half open. From here on frames of that link are ignored (heard,
        // beat, left).
        joined.old_link = member.link;
        if (member.identity.incarnation == identity.incarnation) {
            joined.id = *known;
            joined.resumed = true;
            member.identity = identity;
            member.load = load;
            member.link = link;
            member.heard_ms = now_ms;
            set_state(*known, member, MemberState::kAlive);
            ++epoch_;  // its address may be another
            return joined;
        }
        if (in_touch(member.state)) {
            return Error{Code::kInvalidArgument, "the node " + whole_name +
                                                     " is in the pool already, as another process; give each "
                                                     "node of a host a name of its own (node.name)"};
        }
    } else {
        joined.heard_ms = last_heard(identity);
        if (members_.size() >= options_.members_max) {
            return Error{Code::kTooLarge, "the pool already has " + std::to_string(options_.members_max) +
                                              " nodes, the limit (master.nodes_max)"};
        }
    }
    std::optional<NodeId> id = free_id(usable);
    if (!id) return Error{Code::kTooLarge, "every node number is in use; try again soon"};
    if (known) {
        joined.replaced = known;
        end(*known, true);
    }
    joined.id = *id;
    members_.emplace(*id, CurrentMember{identity, load, MemberState::kAlive, link, now_ms});
    if (alive_.size() <= *id) alive_.resize(size_t{*id} + 1);
    alive_[*id] = true;
    ++epoch_;
    return joined;
}

// Fenced only when another incarnation took the place: a node that fell silent, or left, may come back as
// it was.
void Membership::end(NodeId id, bool fenced) {
    auto it = members_.find(id);
    past_.push_back(Past{std::move(it->second.identity), it->second.heard_ms, fenced});
    if (past_.size() > options_.past_max) past_.pop_front();
    members_.erase(it);
    alive_[id] = false;
    ++epoch_;
}

void Membership::set_state(NodeId id, CurrentMember& member, MemberState state) {
    if (state == MemberState::kAlive && member.joining) state = MemberState::kJoining;
    if (member.state == state) return;
    member.state = state;
    alive_[id] = state == MemberState::kAlive;
    ++epoch_;
}

void Membership::heard(uint64_t now_ms, NodeId id, LinkId link) {
    auto it = members_.find(id);
    if (it == members_.end() || it->second.link != link)
        return;  // an old connection of an incarnation that has moved
    it->second.heard_ms = now_ms;
    set_state(id, it->second, MemberState::kAlive);
}

void Membership::beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load) {
    heard(now_ms, id, link);
    auto it = members_.find(id);
    if (it != members_.end() && it->second.link == link) it->second.load = load;
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
    it->second.heard_ms = now_ms;
    end(id, false);
    return true;
}

std::vector<NodeId> Membership::tick(uint64_t now_ms) {
    // When this process itself stood still (suspended, or swapped out), the members were not silent for it:
    // the time is credited to all of them, or every node would be suspect at once.
    uint64_t gap = now_ms - std::exchange(ticked_ms_, now_ms);
    std::vector<NodeId> gone;
    for (auto& [id, member] : members_) {
        // What they sent meanwhile waits to be read.
        if (gap > options_.suspect_ms / 2) member.heard_ms = std::min(now_ms, member.heard_ms + gap);
        uint64_t silent_ms = now_ms - std::min(now_ms, member.heard_ms);
        if (silent_ms >= options_.suspect_ms) set_state(id, member, MemberState::kSuspect);
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
    struct Choice {
        NodeId id;
        TenantLoad* load;
        bool room;
    };
    std::vector<Choice> choices;
    for (auto& [id, member] : members_) {
        if (member.state != MemberState::kAlive) continue;
        if (std::find(avoid_nodes.begin(), avoid_nodes.end(), id) != avoid_nodes.end()) continue;
        if (std::find(avoid_hosts.begin(), avoid_hosts.end(), member.identity.host_id) != avoid_hosts.end())
            continue;
        // The load is what the node said with its last beat. It is lowered by what is placed here, so that
        // several calls between two beats spread over the nodes.
        auto* load = const_cast<TenantLoad*>(member.load.find(tenant));
        if (load == nullptr || load->arena_bytes < bytes) continue;
        // More than just enough: a node that is nearly full evicts already.
        bool room = load->free_bytes >= bytes + load->arena_bytes / 8;
        if (room || evict) choices.push_back({id, load, room});
    }
    // Free room first, the most of it; then where the oldest blocks are.
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
        if (a.room != b.room) return a.room;
        if (a.room) return a.load->free_bytes > b.load->free_bytes;
        return a.load->oldest_age_ms > b.load->oldest_age_ms;
    });
    std::vector<NodeId> chosen;
    std::set<std::string_view> hosts;
    for (const Choice& choice : choices) {
        if (chosen.size() == n) break;
        if (!hosts.insert(members_.at(choice.id).identity.host_id).second) continue;
        choice.load->free_bytes -= std::min(bytes, choice.load->free_bytes);
        chosen.push_back(choice.id);
    }
    return chosen;
}

LinkId Membership::link(NodeId id) const {
    auto it = members_.find(id);
    return it == members_.end() ? kNoLink : it->second.link;
}

size_t Membership::suspects() const {
    return static_cast<size_t>(std::count_if(members_.begin(), members_.end(), [](const auto& entry) {
        return entry.second.state == MemberState::kSuspect;
    }));
}

Members Membership::current(uint64_t now_ms) const {
    Members members;
    members.epoch = epoch_;
    for (const auto& [id, member] : members_) {
        members.rows.push_back(Member{id, member.state, member.identity, member.load,
                                      now_ms - std::min(now_ms, member.heard_ms)});
    }
    return members;
}

bool Membership::check_integrity() const {
    std::set<std::pair<std::string, std::string>> names;
    for (const auto& [id, member] : members_) {
        if (!names.emplace(member.identity.host_id, member.identity.name).second) return false;
        if (alive(id) != (member.state == MemberState::kAlive)) return false;
        if (member.link == kNoLink && member.state != MemberState::kSuspect) return false;
        for (const Past& past : past_) {
            if (past.fenced && same_incarnation(past.identity, member.identity)) return false;
        }
    }
    for (size_t id = 0; id < alive_.size(); ++id) {
        if (alive_[id] && !members_.contains(static_cast<NodeId>(id))) return false;
    }
    return members_.size() <= options_.members_max && past_.size() <= options_.past_max;
}

}  // namespace moonpool
