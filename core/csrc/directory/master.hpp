// Master: what the master knows and decides, without a socket, thread or clock: the directory, the members,
// and the order of removals and replacements. The server's loop owns it and brings time and frames.
//
// No copy of a removed key comes back, and of two values of a key the later one wins: see order(). Everything
// here is soft state; a new master starts empty and hears it all again, removals included. A standby is a
// Master, too: nodes tell it what they tell the owner, and the order it hears from the owner (follow).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "directory/directory.hpp"
#include "directory/drop_list.hpp"
#include "directory/member_answers.hpp"
#include "directory/membership.hpp"
#include "directory/mirror.hpp"
#include "directory/pace.hpp"
#include "directory/ranges.hpp"
#include "directory/removal_log.hpp"
#include "directory/requests.hpp"
#include "wire/frame.hpp"

namespace moonpool {

struct MasterLimits {
    MembershipOptions membership;
    PaceOptions pace;
    uint64_t rows_max = 64ull << 20;   // of the directory
    uint32_t removals_max = 1u << 20;  // that are remembered
    uint32_t grace_ms = 5000;          // after the start, for nodes to join in
    uint32_t recovered_ms = 1000;      // of it, nodes that were restarted are not read
    uint32_t order_ms = 3000;          // a removal that was begun counts as carried out after so long,
    uint32_t placed_ms = 5000;         // and where a replacement put its bytes is known for so long
    uint32_t drops_max = 1u << 20;     // that wait for one node; then it drops all that is older
    uint32_t drops_per_answer = 4096;
    uint32_t hashes_per_frame = 16384;
};

struct Ordered;

struct MasterCounters {
    uint64_t joins_total = 0, joins_refused_total = 0, beats_total = 0;
    uint64_t rows_added_total = 0, rows_removed_total = 0, rows_void_total = 0, inventories_total = 0;
    uint64_t locate_keys_total = 0, locate_hits_total = 0;
    uint64_t places_total = 0, places_short_total = 0;
    uint64_t forgets_total = 0, drops_total = 0, drop_alls_total = 0, orders_expired_total = 0;
    uint64_t suspicions_total = 0, nodes_gone_total = 0, nodes_left_total = 0;
};

class Master {
   public:
    // first: later than all that a former master gave. range: keys of others are none of its business.
    Master(const MasterLimits& limits, uint64_t now_ms, Version first, const Range& range = {});

    struct JoinAnswer {
        NodeId id = kNoNode;
        bool resumed = false;
        LinkId close = kNoLink;  // a connection that is no longer its member's
    };
    // applied: the node has carried out all removals up to that one, UINT64_MAX: it holds nothing; none: it
    // is of the release before, and knows no versions.
    Result<JoinAnswer> join(uint64_t now_ms, const NodeIdentity& identity, const NodeLoad& load, LinkId link,
                            std::optional<Version> applied, bool recovered = false);
    void disconnected(NodeId id, LinkId link);
    // The node stops serving: what it held is no longer in the directory, at once.
    void left(uint64_t now_ms, NodeId id, LinkId link);
    bool current(NodeId id, LinkId link) const { return membership_.link(id) == link; }

    // `rows`: whole rows as on the wire; those of other ranges are passed over. applied: the node knew all
    // removals up to that one when it pushed them. False: a row that makes no sense.
    bool delta(uint64_t now_ms, NodeId id, LinkId link, uint8_t flags, Version applied,
               std::string_view rows);
    void beat(uint64_t now_ms, NodeId id, LinkId link, const NodeLoad& load, uint64_t drops_done,
              std::optional<Version> applied);
    const DropList& drops(NodeId id) const { return seats_.at(id).drops; }
    bool knows_versions(NodeId id) const { return seats_.at(id).versions; }
    // Removals that a node knows of a former master. complete_since: up to that one it knows not all that it
    // was told.
    void removals(uint64_t now_ms, NodeId id, LinkId link, Version complete_since,
                  std::span<const Drop> rows);

    // `hashes`: 16 bytes each. Writes the answer's body after the epoch: the number of keys answered, and
    // holders for each.
    void locate(std::string_view hashes, uint8_t flags, uint8_t holders_max, uint32_t width, Writer& out);
    std::vector<NodeId> place(std::string_view tenant, uint64_t bytes, size_t n,
                              const std::vector<NodeId>& avoid_nodes,
                              const std::vector<std::string_view>& avoid_hosts, bool evict);

    // The keys are about to be removed, or replaced at the node `placing`: gives each a place in the order,
    // the first one's, and writes their holders as locate() does, with the nodes that other replacements are
    // about to put them to. The caller tells these, and then calls ordered(); if it does not, the keys are
    // void all the same, after limits.order_ms. taken: if given, keys that a node has are left as they are,
    // and it becomes one row for each key; a place in the order is passed over.
    Version order(uint64_t now_ms, std::string_view hashes, NodeId placing, Writer& out,
                  std::vector<Taken>* taken = nullptr);
    // It has: some nodes know of it. Every other one that has a copy, or comes with one, is told to drop what
    // is older. Writes the answer's body: of each key the last version that was given, which is another one
    // where it was removed or replaced again meanwhile.
    void ordered(uint64_t now_ms, const Ordered& done, Writer& out);

    // The same in one step, for clients of the release before: the keys are void, and of their holders in
    // touch all but `unreached` were told. The number of rows that are void.
    uint32_t forget(uint64_t now_ms, std::string_view hashes, std::span<const NodeId> unreached);

    // ---- The owner of a standby. From attach() on all that changes in the order is recorded there.
    Mirror& mirror() { return mirror_; }
    const Mirror& mirror() const { return mirror_; }
    // Records all that a standby needs to begin with; cut() is called now and then, and at the end.
    void begin_mirror(const std::function<void(uint8_t flags)>& cut);
    MirrorHead mirror_head(uint8_t flags) const;

    // ---- A standby.
    // It follows an owner anew: what it knew of removals and nodes is void.
    void begin_to_follow(uint64_t now_ms);
    // A MIRROR frame. False: it makes no sense.
    bool follow(uint64_t now_ms, Reader frame);
    bool is_standby() const { return standby_; }
    bool is_whole() const { return whole_; }  // it knows all that the owner acknowledged
    // It is the owner from now on. first: as of the constructor.
    void take_over(uint64_t now_ms, Version first, bool all_told);  // all_told: nodes have told it all
    // It is not the owner any more, as another one has taken over.
    void step_down() { standby_ = true, whole_ = false; }
    // A node has heard of later removals than this master gave, which has or had a standby.
    bool superseded() const { return superseded_; }
    // What a client is told of the members, see MemberAnswers.
    const MemberAnswers::Answer& members_since(uint64_t now_ms, uint64_t known, bool takes_changes) {
        return member_answers_.to(membership_, now_ms, known, takes_changes);
    }
    // What it tells the nodes: how long to gather changes, and to wait between two beats, of which they were
    // to send one each least_ms.
    uint32_t batch_ms() const { return pace_.batch_ms(); }
    uint32_t beat_ms(uint32_t least_ms) const {
        return pace_.beat_ms(membership_.size(), least_ms, limits_.membership.suspect_ms);
    }
    uint32_t beats_per_answer(uint32_t least_ms) const {
        return pace_.beats_per_answer(membership_.size(), beat_ms(least_ms));
    }

    // For so much longer nodes that know what a former master gave may have yet to join; 0: they have.
    uint64_t new_for_ms(uint64_t now_ms) const;
    // Whether there may be nodes that have yet to tell what they hold.
    bool filling(uint64_t now_ms) const;
    size_t open() const { return open_.size(); }  // removals that were begun together, and are not ended
    size_t told() const;                          // nodes in touch that have told all they hold

    Version newest() const { return version_; }  // that was given, or a place
    Version first() const { return first_; }     // none that this master gave is earlier
    // All removals up to that one are carried out, but for drops that nodes have yet to carry out.
    Version closed() const;

    // Finds silent members, and removals that were begun and not ended. Called every 50 ms or so.
    void tick(uint64_t now_ms);
    bool sweep() { return directory_.sweep(); }

    const Membership& membership() const { return membership_; }
    const Directory& directory() const { return directory_; }
    size_t removals() const { return log_.size(); }
    const MasterCounters& counters() const { return counters_; }
    const MasterLimits& limits() const { return limits_; }
    const Range& range() const { return range_; }
    bool check_integrity() const;

   private:
    struct Fold {
        size_t operator()(const Hash128& hash) const { return hash.high; }
    };
    // What belongs to the current incarnation of a member.
    struct Seat {
        NodeId id;
        DropList drops;
        Incarnation incarnation;
        bool versions = false;             // its node knows them
        bool settled = false;              // its inventory is told
        Version all_told_at = UINT64_MAX;  // since then the master has heard of all that it holds
        Version applied = kNoVersion;
        uint64_t since_epoch = 0;        // of the membership, when it joined
        bool recovered = false;          // what it held when it joined no master had told it about
        Version of_former = UINT64_MAX;  // up to which it was right when it came from a former master
        uint64_t joined_when = 0;        // it is joining until so many drops are confirmed
        // Later removals than `applied` that it knows.
        std::unordered_map<Hash128, Version, Fold> told{};
    };
    // Removals that were begun together: versions first to last.
    struct Open {
        Version last;
        uint64_t at_ms;
    };
    struct Placed {
        NodeId node;
        Version version;
        uint64_t at_ms;
        bool here = false;  // its bytes are
    };

    void clear_seat(NodeId id);
    void hear_again(Seat& seat);
    void know(Seat& seat, const Hash128& hash, Version place);
    bool knows(const Seat& seat, const Hash128& hash, Version place) const;
    // here: its bytes are, too.
    bool is_placing(NodeId id, const Hash128& hash, Version version, bool here = false) const;
    template <class Is>
    void forget_placed(Is is);
    bool spares(const Seat& seat, const Removal& removal) const;
    bool is_open(const Removal& removal) const;
    Removal last_ended(const Hash128& hash) const { return last_ended(hash, log_.find(hash)); }
    Removal last_ended(const Hash128& hash, const Removal& removal) const;
    void keep_last_ended(const Hash128& hash);
    Taken taken(uint64_t now_ms, const Hash128& hash);
    void drop(Seat& seat, const Hash128& hash, Version version);
    void apply(Seat& seat, std::optional<Version> applied);
    uint64_t age_ms(uint64_t now_ms) const;
    void seem_joining(uint64_t now_ms, NodeId id, Seat& seat);
    void void_copies(const Hash128& hash);
    void add_removal(const Hash128& hash, Version version, Version place, bool of_absent = false);
    bool learn_removal(const Drop& removal);
    void learn_what_nodes_told();
    void place_at(const Hash128& hash, const Placed& placed);
    void end_order(const Ordered& done, uint64_t now_ms);
    void mirror_placed(const Hash128& hash, const Placed& placed);
    void mirror_ended(const Ordered& done);
    bool follow_record(Reader& r);
    bool follow_ended(Reader& r);
    Version closed_here() const;
    void hear_version(Version version);
    void find_holders(const Hash128& hash, bool suspects);
    void write_found(size_t limit, Writer& out);
    void go_on_behind(Version version);

    MasterLimits limits_;
    Range range_;
    uint64_t started_ms_;
    Directory directory_;
    Membership membership_;
    MemberAnswers member_answers_;
    Pace pace_;
    Version first_, version_;
    Version former_most_ = kNoVersion;  // up to which any node was right when it came from a former master
    RemovalLog log_;
    RemovalLog told_early_;         // what nodes told a standby while its owner was new
    std::map<Version, Open> open_;  // by the first version of each
    std::unordered_map<Hash128, Removal, Fold> before_open_;         // of a key: the last that has ended
    std::unordered_map<Hash128, std::vector<Placed>, Fold> placed_;  // of a moment ago
    std::map<Incarnation, NodeId> numbers_;
    Mirror mirror_;
    bool one_of_several_ = false, superseded_ = false;
    bool standby_ = false, whole_ = false;
    Version closed_of_owner_ = kNoVersion;
    uint64_t followed_ms_ = 0;               // when the last frame of the owner came
    std::optional<uint64_t> joinable_ms_{};  // since when a standby knows all, and nodes join it
    ByNode<Seat> seats_;
    std::set<NodeId> owing_;      // that have drops to carry out
    std::set<NodeId> unsettled_;  // whose inventory is not told
    std::set<NodeId> joining_;    // that are not read: they may have yet to drop something
    MasterCounters counters_;
    std::vector<Holder> found_;  // scratch
};

}  // namespace moonpool
