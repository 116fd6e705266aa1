// The nouns of the directory, as master, nodes and clients share them. Values only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/xxh3.hpp"
#include "wire/auth.hpp"

namespace moonpool {

inline constexpr uint32_t kShards = 1024;  // virtual shards of the key hash: fixed by the wire format

inline uint32_t shard_of(const Hash128& hash) { return static_cast<uint32_t>(hash.low % kShards); }

inline constexpr uint32_t kRangesMax = 16;  // of shards, each with a master of its own (ranges.hpp)

inline uint32_t range_of(const Hash128& hash, uint32_t count) { return shard_of(hash) * count / kShards; }

enum class Tier : uint8_t { kDram = 0, kSsd = 1 };
inline constexpr size_t kTiers = 2;

// One incarnation of a node, as the master numbers it: a new incarnation gets a new number, and a number is
// given to another incarnation only after every row of the old one is gone.
using NodeId = uint16_t;
inline constexpr NodeId kNoNode = 0xFFFF;

struct Holder {
    NodeId node = kNoNode;
    Tier tier = Tier::kDram;

    friend bool operator==(const Holder&, const Holder&) = default;
};

// Alive: heard from within the last second. Suspect: its connection broke, or it was silent; its rows stay,
// and no client is sent there. Gone: silent for so long, or replaced by a new incarnation; its rows are void.
// Joining: in touch, and it has yet to drop what was removed while it was not; nothing is read there.
enum class MemberState : uint8_t { kAlive = 0, kSuspect = 1, kGone = 2, kJoining = 3 };

// Whether a client can ask it something.
inline bool in_touch(MemberState state) {
    return state == MemberState::kAlive || state == MemberState::kJoining;
}

struct TenantLoad {
    std::string tenant;
    uint64_t arena_bytes = 0;
    uint64_t free_bytes = 0;
    uint64_t objects = 0;
    uint64_t oldest_age_ms = 0;  // since its next victim was last used

    friend bool operator==(const TenantLoad&, const TenantLoad&) = default;
};

// What a node says of itself with every beat.
struct NodeLoad {
    std::vector<TenantLoad> tenants;
    uint64_t ssd_bytes = 0;
    uint64_t ssd_free_bytes = 0;

    const TenantLoad* find(std::string_view tenant) const {
        auto it = std::find_if(tenants.begin(), tenants.end(),
                               [&](const TenantLoad& load) { return load.tenant == tenant; });
        return it == tenants.end() ? nullptr : &*it;
    }
    friend bool operator==(const NodeLoad&, const NodeLoad&) = default;
};

// What identifies a node. Two nodes are the same member when host_id and name are equal.
struct NodeIdentity {
    std::string name;
    Incarnation incarnation{};
    std::string host_id;
    std::string address;          // of its wire, "ip:port"; empty: it is reached by its socket only
    std::string socket_path;      // of its Unix socket, for processes of its host; may be empty
    std::string events{};         // where other hosts subscribe to its KV events, "tcp://..."; empty: nowhere
    std::string events_replay{};  // and where these are replayed

    friend bool operator==(const NodeIdentity&, const NodeIdentity&) = default;
};

// Why the master does not take a node under these names, or nothing: they are printed by terminals and logs
// of people, so only characters that print, and not too many.
std::string unfit_names(const NodeIdentity& who);

struct Member {
    NodeId id = kNoNode;
    MemberState state = MemberState::kAlive;
    NodeIdentity identity;
    NodeLoad load;           // as of its last beat before this was asked
    uint64_t silent_ms = 0;  // since it was last heard

    friend bool operator==(const Member&, const Member&) = default;
};

// One reading of the membership. Another epoch: a member came, went or changed its state since.
struct Members {
    uint64_t epoch = 0;
    std::vector<Member> rows;  // by id
    // While a new master fills its directory: the members as its predecessor saw them, without ids. A key
    // that the new master does not find may exist all the same, and a node that it does not list may live.
    std::shared_ptr<const Members> before;
    uint64_t reading = 0;  // counted by the client that reads

    // In a pool of several ranges each range's master has a state of its own for each node: one that is
    // joining there may be read for keys of another range. Of each row in turn one of each range.
    uint32_t ranges = 1;
    std::vector<MemberState> states{};
    uint32_t filling = 0;  // a bit for each range: its master is new, and fills its directory
    uint32_t away = 0;     // the same: its master does not answer, and its word is an old one

    // As the master of that key sees a member of this list.
    MemberState state(const Member& member, const Hash128& hash) const {
        const Member* begin = rows.data();
        bool is_row = !std::less<>{}(&member, begin) && std::less<>{}(&member, begin + rows.size());
        if (ranges == 1 || !is_row) return member.state;
        return states[static_cast<size_t>(&member - begin) * ranges + range_of(hash, ranges)];
    }
    // For each master.
    bool is_alive(const Member& row) const {
        auto first = static_cast<size_t>(&row - rows.data()) * ranges;
        auto of_row = std::span(states).subspan(ranges == 1 ? 0 : first, ranges == 1 ? 0 : ranges);
        return row.state == MemberState::kAlive &&
               std::ranges::all_of(of_row, [](MemberState state) { return state == MemberState::kAlive; });
    }
    bool is_filling(const Hash128& hash) const {
        return ranges == 1 ? before != nullptr : (filling >> range_of(hash, ranges) & 1) != 0;
    }

    const Member* find(NodeId id) const {
        auto it = std::lower_bound(rows.begin(), rows.end(), id,
                                   [](const Member& member, NodeId wanted) { return member.id < wanted; });
        return it == rows.end() || it->id != id ? nullptr : &*it;
    }
    const Member* find(const Incarnation& incarnation) const {
        auto it =
            std::ranges::find(rows, incarnation, [](const Member& m) { return m.identity.incarnation; });
        if (it != rows.end()) return &*it;
        return before == nullptr ? nullptr : before->find(incarnation);
    }
};

// The holders of each key of a query, in the order of the keys.
class Located {
   public:
    size_t size() const { return ends_.size(); }  // with prefix: how many leading keys have a holder
    std::span<const Holder> operator[](size_t i) const {
        size_t begin = i == 0 ? 0 : ends_[i - 1];
        return std::span(holders_).subspan(begin, ends_[i] - begin);
    }

    void append(Holder holder) { holders_.push_back(holder); }  // to the key that is being written
    void end_key() { ends_.push_back(static_cast<uint32_t>(holders_.size())); }
    void cut(size_t keys) {
        if (keys >= ends_.size()) return;
        ends_.resize(keys);
        holders_.resize(keys == 0 ? 0 : ends_[keys - 1]);
    }

   private:
    std::vector<Holder> holders_;
    std::vector<uint32_t> ends_;
};

}  // namespace moonpool
