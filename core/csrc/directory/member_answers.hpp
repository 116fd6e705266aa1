// MemberAnswers: what the answers to MEMBERS have in common. Many clients know the same epoch and ask within
// moments of each other; the rows are written once for all of them. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "directory/member_frames.hpp"
#include "directory/membership.hpp"

namespace moonpool {

class MemberAnswers {
   public:
    struct Answer {
        uint8_t flags = 0;            // kMembersChanged, kMembersSince
        std::vector<std::byte> rows;  // that follow
    };

    // To a client that knows that epoch, and takes changes or not. Loads and silences are at most kFreshMs
    // old. Valid until the next call.
    const Answer& to(const Membership& membership, uint64_t now_ms, uint64_t known, bool takes_changes) {
        if (known == membership.epoch()) return unchanged_;
        bool stale = epoch_ != membership.epoch() || now_ms - since_ms_ >= kFreshMs;
        if (stale || answers_.size() >= kAnswersMax) {
            answers_.clear();
            epoch_ = membership.epoch();
            since_ms_ = now_ms;
        }
        const uint64_t since = takes_changes ? known : kWhole;
        auto kept = answers_.find(since);
        if (kept != answers_.end()) return kept->second;
        std::optional<Membership::Changes> changes;
        if (takes_changes) changes = membership.changes(known);
        if (!changes && since != kWhole) return to(membership, now_ms, known, false);
        Answer& answer = answers_[since];
        Writer w(answer.rows);
        if (changes) {
            answer.flags = kMembersChanged | kMembersSince;
            told(membership, now_ms, *changes).write(w);
        } else {
            answer.flags = kMembersChanged;
            write_member_rows(w, membership.current(now_ms).rows);
        }
        return answer;
    }

   private:
    static constexpr uint64_t kFreshMs = 200;
    static constexpr size_t kAnswersMax = 16;
    static constexpr uint64_t kWhole = 0;  // of answers_: no epoch

    static MemberChanges told(const Membership& membership, uint64_t now_ms,
                              const Membership::Changes& changes) {
        MemberChanges told;
        told.ended = changes.ended;
        for (NodeId id : changes.turned)
            told.turned.push_back({id, membership.state(id), membership.silent_ms(now_ms, id)});
        for (NodeId id : changes.moved) told.moved.push_back(membership.member(now_ms, id));
        return told;
    }

    const Answer unchanged_;
    std::map<uint64_t, Answer> answers_;  // by the epoch that is known
    uint64_t epoch_ = 0, since_ms_ = 0;
};

}  // namespace moonpool
