// Membership: the nodes in the pool. Pure: `now_ms` of a clock that never jumps and events in, effects out.
//
//   join --> alive --silent for suspect_ms, or its link broke--> suspect --silent for gone_ms--> past
//              ^------------------ heard, or joined again --------|
//                       alive or suspect --it says that it leaves--> past
//
// While the master has a member down as joining, it is joining where it would be alive.
//
// A member is (host_id, name); an incarnation of it is an incarnation, and an incarnation that has a number
// (NodeId) has rows in the directory. A new incarnation of a member takes its place once the old one is
// suspect; from then on the old one is fenced: it is refused for as long as it is remembered. While the old
// one is alive, the new one is refused: two processes under one name would otherwise replace each other for
// ever.
//
// Every change of a member has an epoch of its own. What changed since an epoch is told without a look at the
// other members (changes); the ends of members are remembered for so long as ends_max allows.
//
// Invariants (check_integrity): at most one current incarnation of each member; no incarnation is current and
// fenced; a member without a link is suspect; the indexes say what a walk over all members would find.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/soft_limit.hpp"
#include "directory/by_node.hpp"
#include "directory/place_index.hpp"
#include "directory/types.hpp"

namespace moonpool {

struct MembershipOptions {
    // As expected: beyond it the limit rises up to members_most. Numbers have 16 bits, and some of those that
    // are not in use wait to be swept.
    uint32_t members_max = 1024;
    uint32_t members_most = 65000;
    uint32_t past_max = 1024;    // incarnations that are remembered after their end,
    uint64_t past_ms = 3600000;  // and for how long
    uint32_t ends_max = 16384;   // ends of members that clients can be told of one by one
    uint32_t suspect_ms = 1000;
    uint32_t gone_ms = 30000;
};

using LinkId = uint64_t;  // a connection, never used twice
inline constexpr LinkId kNoLink = 0;

class Membership {
   public:
    struct Joined {
        NodeId id = kNoNode;
        bool resumed = false;    // the same incarnation under the same number: its rows still count
        bool was_alive = false;  // and its former connection stands: it was never out of touch
        std::optional<NodeId> replaced;
        LinkId old_link = kNoLink;           // to be closed: of the same member, or of the one it replaced
        std::optional<uint64_t> heard_ms{};  // when this member was last in touch, if that is known
    };
    struct Past {
        NodeIdentity identity;
        uint64_t heard_ms = 0;
        bool fenced = false;
    };

    explicit Membership(MembershipOptions options) : options_(options), limit_(options.members_max) {}

    // usable(id): whether the directory is done with what an earlier incarnation left under that number.
    Result<Joined> join(uint64_t now_ms, const NodeIdentity& who, const NodeLoad& load, LinkId link,
                        const std::function<bool(NodeId)>& usable);
    void heard(uint64_t now_ms, NodeId id, LinkId link);
    void beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load);
    void disconnected(NodeId id, LinkId link);
    void set_joining(NodeId id, bool joining);
    bool left(uint64_t now_ms, NodeId id, LinkId link);  // false: that connection no longer speaks for it

    // Silence is noticed here. The incarnations that are gone now; their rows are void. A clock that stood
    // still, or a caller that was itself stopped, is no silence of the members.
    std::vector<NodeId> tick(uint64_t now_ms);

    // Nodes for `bytes` more of a tenant: see DirectoryClient::place. What was promised counts as taken until
    // the node's next beat. Costs the logarithm of the number of nodes, and the nodes that are to be avoided
    // or share a host.
    std::vector<NodeId> place(std::string_view tenant, uint64_t bytes, size_t n,
                              const std::vector<NodeId>& avoid_nodes,
                              const std::vector<std::string_view>& avoid_hosts, bool evict);

    uint64_t epoch() const { return epoch_; }
    bool alive(NodeId id) const { return id < alive_.size() && alive_[id]; }
    LinkId link(NodeId id) const;
    MemberState state(NodeId id) const;      // kGone: it has no current incarnation
    Members current(uint64_t now_ms) const;  // alive, joining and suspect
    // Of a current one.
    Member member(uint64_t now_ms, NodeId id) const;
    const NodeIdentity& identity(NodeId id) const { return members_.at(id).identity; }
    uint64_t silent_ms(uint64_t now_ms, NodeId id) const;
    // What to do to the members of that epoch to have the current ones, in this order.
    struct Changes {
        std::vector<NodeId> ended;   // that are taken out; some may be another member's number by now
        std::vector<NodeId> turned;  // whose state alone is another
        std::vector<NodeId> moved;   // that are new, or of which more is another
    };
    std::optional<Changes> changes(uint64_t since) const;  // nothing: it is not known any more, or never was
    const std::deque<Past>& past() const { return past_; }
    size_t size() const { return members_.size(); }
    size_t suspects() const { return suspects_; }
    const SoftLimit& limit() const { return limit_; }

    bool check_integrity() const;

   private:
    struct CurrentMember {
        NodeIdentity identity;
        NodeLoad load;
        MemberState state = MemberState::kAlive;
        LinkId link = kNoLink;
        bool joining = false;
        uint64_t changed_epoch = 0, moved_epoch = 0;  // of its last change, and of the last but of its state
    };
    static constexpr uint64_t kNever = UINT64_MAX;
    using Name = std::pair<std::string, std::string>;  // host_id and name

    std::optional<NodeId> find(const NodeIdentity& identity) const;
    std::optional<uint64_t> last_heard(const NodeIdentity& identity) const;
    std::optional<NodeId> free_id(const std::function<bool(NodeId)>& usable);
    void end(NodeId id, bool fenced);
    void set_state(NodeId id, CurrentMember& member, MemberState state);
    void enter_state(NodeId id, CurrentMember& member, MemberState state);
    void leave_state(NodeId id, const CurrentMember& member);
    void set_load(NodeId id, CurrentMember& member, const NodeLoad& load);
    void changed(NodeId id, CurrentMember& member, bool moved);

    MembershipOptions options_;
    SoftLimit limit_;  // of members_
    ByNode<CurrentMember> members_;
    std::vector<uint64_t> heard_ms_;  // of members_; kNever: there is none
    std::map<Name, NodeId> by_name_;
    std::map<uint64_t, NodeId> by_change_;          // by changed_epoch
    std::deque<std::pair<uint64_t, NodeId>> ends_;  // with their epochs, oldest first
    uint64_t ends_since_ = 1;                       // from that epoch on ends_ has all
    std::set<NodeId> free_;                         // numbers below next_id_ that no member has
    uint32_t next_id_ = 0;
    PlaceIndex places_;        // of those that are alive
    std::vector<bool> alive_;  // by id: what lookups ask for each holder
    size_t suspects_ = 0;
    std::deque<Past> past_;  // oldest first
    uint64_t epoch_ = 1;
    uint64_t ticked_ms_ = 0;
};

}  // namespace moonpool
