// Master: what the master knows and decides, without a socket, thread or clock: the directory, the members,
// and what was removed while a node was away. The server's loop owns it and brings time and frames.
//
// No copy of a removed key comes back: see forget(). Everything here is soft state; a new master starts empty
// and hears it all again.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "directory/directory.hpp"
#include "directory/drop_list.hpp"
#include "directory/membership.hpp"
#include "directory/tombstones.hpp"
#include "wire/frame.hpp"

namespace moonpool {

struct MasterLimits {
    MembershipOptions membership;
    uint64_t rows_max = 64ull << 20;     // of the directory
    uint32_t tombstones_max = 1u << 20;  // removals that are remembered
    uint32_t tombstones_ms = 3000;       // for so long also while no node is away,
    uint32_t grace_ms = 5000;    // and every one for so long after the start; longer than the line above
    uint32_t drops_max = 65536;  // that wait for one node; then it drops all it holds
    uint32_t drops_per_answer = 4096;
    uint32_t hashes_per_frame = 16384;
};

struct MasterCounters {
    uint64_t joins_total = 0, joins_refused_total = 0, beats_total = 0;
    uint64_t rows_added_total = 0, rows_removed_total = 0, inventories_total = 0;
    uint64_t locate_keys_total = 0, locate_hits_total = 0;
    uint64_t places_total = 0, places_short_total = 0;
    uint64_t forgets_total = 0, drops_total = 0, drop_alls_total = 0;
    uint64_t suspicions_total = 0, nodes_gone_total = 0, nodes_left_total = 0;
};

class Master {
   public:
    explicit Master(const MasterLimits& limits, uint64_t now_ms);

    struct JoinAnswer {
        NodeId id = kNoNode;
        bool resumed = false;
        LinkId close = kNoLink;  // a connection that is no longer its member's
    };
    Result<JoinAnswer> join(uint64_t now_ms, const NodeIdentity& identity, const NodeLoad& load, LinkId link);
    void disconnected(NodeId id, LinkId link);
    // The node stops serving: what it held is no longer in the directory, at once.
    void left(uint64_t now_ms, NodeId id, LinkId link);
    bool current(NodeId id, LinkId link) const { return membership_.link(id) == link; }

    // `rows`: whole rows as on the wire. False: a row that makes no sense.
    bool delta(uint64_t now_ms, NodeId id, LinkId link, uint8_t flags, std::string_view rows);
    void beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load, uint64_t drops_done);
    const DropList& drops(NodeId id) const { return seats_.at(id).drops; }

    // `hashes`: 16 bytes each. Writes the answer's body after the epoch: the number of keys answered, and
    // holders for each.
    void locate(std::string_view hashes, uint8_t flags, uint8_t holders_max, uint32_t width, Writer& out);
    std::vector<NodeId> place(std::string_view tenant, uint64_t bytes, size_t n,
                              const std::vector<NodeId>& avoid_nodes,
                              const std::vector<std::string_view>& avoid_hosts, bool evict);

    // The keys are void. Their rows of every node that is not in touch (suspect, or still telling its
    // inventory) or could not be reached by the caller are removed, and such a node is told, at the latest
    // when it comes back. Nodes in touch were told by the caller, and tell us themselves. The number of rows.
    uint32_t forget(uint64_t now_ms, std::string_view hashes, std::span<const NodeId> unreached);

    // Whether every node that may hold something is in touch, as far as this master can know. In its first
    // seconds it cannot.
    bool all_here(uint64_t now_ms) const;

    // Whether there may be nodes that have yet to tell what they hold.
    bool filling(uint64_t now_ms) const;

    // Finds silent members, and drops tombstones that no node needs. Called every 50 ms or so.
    void tick(uint64_t now_ms);
    bool sweep() { return directory_.sweep(); }

    const Membership& membership() const { return membership_; }
    const Directory& directory() const { return directory_; }
    size_t tombstones() const { return tombstones_.size(); }
    const MasterCounters& counters() const { return counters_; }
    const MasterLimits& limits() const { return limits_; }
    bool check_integrity() const;

   private:
    // What belongs to the current incarnation of a member.
    struct Seat {
        DropList drops;
        uint64_t away_since_ms = 0;
        bool settled = false;  // its inventory is told
    };

    bool in_touch(NodeId id) const;
    void clear_seat(uint64_t now_ms, NodeId id);
    void forget_again(uint64_t now_ms, const DropList& drops);

    MasterLimits limits_;
    uint64_t started_ms_;
    uint64_t pruned_ms_ = 0;
    Directory directory_;
    Membership membership_;
    Tombstones tombstones_;
    std::map<NodeId, Seat> seats_;
    MasterCounters counters_;
    std::vector<Holder> found_;  // scratch
};

}  // namespace moonpool
