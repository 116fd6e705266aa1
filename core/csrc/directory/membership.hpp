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
// Invariants (check_integrity): at most one current incarnation of each member; no incarnation is current and
// fenced; a member without a link is suspect.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "base/result.hpp"
#include "directory/types.hpp"

namespace moonpool {

struct MembershipOptions {
    uint32_t members_max = 1024;
    uint32_t past_max = 1024;    // incarnations that are remembered after their end,
    uint64_t past_ms = 3600000;  // and for how long
    uint32_t suspect_ms = 1000;
    uint32_t gone_ms = 30000;
};

using LinkId = uint64_t;  // a connection, never used twice
inline constexpr LinkId kNoLink = 0;

class Membership {
   public:
    struct Joined {
        NodeId id = kNoNode;
        bool resumed = false;  // the same incarnation under the same number: its rows still count
        std::optional<NodeId> replaced;
        LinkId old_link = kNoLink;           // to be closed: of the same member, or of the one it replaced
        std::optional<uint64_t> heard_ms{};  // when this member was last in touch, if that is known
    };
    struct Past {
        NodeIdentity identity;
        uint64_t heard_ms = 0;
        bool fenced = false;
    };

    explicit Membership(MembershipOptions options) : options_(options) {}

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
    // the node's next beat.
    std::vector<NodeId> place(std::string_view tenant, uint64_t bytes, size_t n,
                              const std::vector<NodeId>& avoid_nodes,
                              const std::vector<std::string_view>& avoid_hosts, bool evict);

    uint64_t epoch() const { return epoch_; }
    bool alive(NodeId id) const { return id < alive_.size() && alive_[id]; }
    LinkId link(NodeId id) const;
    MemberState state(NodeId id) const;      // kGone: it has no current incarnation
    Members current(uint64_t now_ms) const;  // alive, joining and suspect
    const std::deque<Past>& past() const { return past_; }
    size_t size() const { return members_.size(); }
    size_t suspects() const;

    bool check_integrity() const;

   private:
    struct CurrentMember {
        NodeIdentity identity;
        NodeLoad load;
        MemberState state = MemberState::kAlive;
        LinkId link = kNoLink;
        uint64_t heard_ms = 0;
        bool joining = false;
    };

    std::optional<NodeId> find(const NodeIdentity& identity) const;
    std::optional<uint64_t> last_heard(const NodeIdentity& identity) const;
    std::optional<NodeId> free_id(const std::function<bool(NodeId)>& usable) const;
    void end(NodeId id, bool fenced);
    void set_state(NodeId id, CurrentMember& member, MemberState state);

    MembershipOptions options_;
    std::map<NodeId, CurrentMember> members_;
    std::vector<bool> alive_;  // by id: what lookups ask for each holder
    std::deque<Past> past_;    // oldest first
    uint64_t epoch_ = 1;
    uint64_t ticked_ms_ = 0;
};

}  // namespace moonpool
