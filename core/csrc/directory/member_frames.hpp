// The members in an answer to MEMBERS (docs/wire_master.md has the byte tables): all of them, or what changed
// since the epoch that the client knows. Written by the master, read by the clients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "directory/protocol.hpp"
#include "directory/types.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline constexpr uint8_t kMembersChanged = 1;  // rows follow
inline constexpr uint8_t kMembersFilling = 2;
inline constexpr uint8_t kMembersSince = 4;   // with kMembersChanged: what follows is what changed since
inline constexpr uint8_t kMembersInFile = 8;  // of a node that relays: the list is in members_file.hpp
// Flags of the question: the client takes what changed,
inline constexpr uint8_t kMembersTake = 1;
inline constexpr uint8_t kMembersByFile = 2;  // or reads it in the memory that its node shares

// The state of a member: all that is told of one of which nothing else changed.
struct MemberTurn {
    NodeId id = kNoNode;
    MemberState state = MemberState::kAlive;
    uint64_t silent_ms = 0;
};
inline void write_turn(Writer& w, const MemberTurn& turn) {
    w.number(turn.id);
    // A client of the release before knows no members that join: for it they are suspect.
    bool joining = turn.state == MemberState::kJoining;
    w.number(static_cast<uint8_t>(joining ? MemberState::kSuspect : turn.state));
    w.number(static_cast<uint8_t>(joining));
    w.number(turn.silent_ms);
}
inline bool read_turn(Reader& r, MemberTurn& turn) {
    turn.id = r.number<NodeId>();
    auto state = r.number<uint8_t>();
    bool joining = r.number<uint8_t>() != 0;
    turn.silent_ms = r.number<uint64_t>();
    if (state > static_cast<uint8_t>(MemberState::kGone)) return false;
    turn.state = joining ? MemberState::kJoining : static_cast<MemberState>(state);
    return r.ok();
}

inline void write_member(Writer& w, const Member& member) {
    write_turn(w, {member.id, member.state, member.silent_ms});
    write_identity(w, member.identity);
    write_load(w, member.load);
}
inline bool read_member(Reader& r, Member& member) {
    MemberTurn turn;
    if (!read_turn(r, turn)) return false;
    member.id = turn.id;
    member.state = turn.state;
    member.silent_ms = turn.silent_ms;
    return read_identity(r, member.identity) && read_load(r, member.load);
}

inline void write_member_rows(Writer& w, const std::vector<Member>& rows) {
    w.number(static_cast<uint32_t>(rows.size()));
    for (const Member& member : rows) write_member(w, member);
    for (const Member& member : rows) write_event_endpoints(w, member.identity);
}
inline bool read_member_rows(Reader& r, std::vector<Member>& rows) {
    auto n = r.number<uint32_t>();
    if (n > r.left()) return false;
    for (uint32_t i = 0; i < n; ++i) {
        if (!read_member(r, rows.emplace_back())) return false;
    }
    for (Member& member : rows) {
        if (!read_event_endpoints(r, member.identity)) return false;
    }
    return true;
}

// What became of the members of an epoch until another one, to be carried out in this order: their numbers
// are taken out, their states are set, rows are put in the place of those with the same number.
struct MemberChanges {
    std::vector<NodeId> ended;
    std::vector<MemberTurn> turned;
    std::vector<Member> moved;

    void write(Writer& w) const {
        w.number(static_cast<uint16_t>(ended.size()));
        for (NodeId id : ended) w.number(id);
        w.number(static_cast<uint16_t>(turned.size()));
        for (const MemberTurn& turn : turned) write_turn(w, turn);
        write_member_rows(w, moved);
    }
    bool read(Reader& r) {
        auto n = r.number<uint16_t>();
        if (n * sizeof(NodeId) > r.left()) return false;
        ended.resize(n);
        for (NodeId& id : ended) id = r.number<NodeId>();
        n = r.number<uint16_t>();
        if (n > r.left()) return false;
        turned.resize(n);
        for (MemberTurn& turn : turned) {
            if (!read_turn(r, turn)) return false;
        }
        return read_member_rows(r, moved);
    }
    // False: they are not of these members.
    bool carry_out(std::vector<Member>& rows) const {
        auto gone = ended;
        std::ranges::sort(gone);
        std::erase_if(rows, [&](const Member& row) { return std::ranges::binary_search(gone, row.id); });
        auto at = [&](NodeId id) { return std::ranges::lower_bound(rows, id, {}, &Member::id); };
        for (const MemberTurn& turn : turned) {
            auto row = at(turn.id);
            if (row == rows.end() || row->id != turn.id) return false;
            row->state = turn.state;
            row->silent_ms = turn.silent_ms;
        }
        std::vector<Member> fresh = moved;
        std::ranges::sort(fresh, {}, &Member::id);
        std::vector<Member> merged;
        merged.reserve(rows.size() + fresh.size());
        auto put = fresh.begin();
        for (Member& row : rows) {
            while (put != fresh.end() && put->id < row.id) merged.push_back(std::move(*put++));
            if (put != fresh.end() && put->id == row.id) continue;
            merged.push_back(std::move(row));
        }
        std::move(put, fresh.end(), std::back_inserter(merged));
        rows = std::move(merged);
        return true;
    }
};

}  // namespace moonpool
