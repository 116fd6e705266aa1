// MembersCache: the list of members as a client last heard it from its master, which sends what has changed
// since. Pure: times are the caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "directory/member_frames.hpp"
#include "directory/types.hpp"

namespace moonpool {

class MembersCache {
   public:
    explicit MembersCache(uint64_t fresh_ms) : fresh_ms_(fresh_ms) {}

    // A connection stands, to a master that may count its epochs anew. A restarted master fills up over some
    // seconds. Until it says that it is complete (kMembersFilling), the nodes known before are kept, so that
    // a caller can still ask them directly; their ids mean nothing to the new master.
    void connected() {
        heard_ms_.reset();
        epoch_ = 0;
        if (before_ != nullptr || members_ == nullptr) return;
        auto before = std::make_shared<Members>(*members_);
        for (Member& member : before->rows) member.id = kNoNode;  // it numbers them anew, too
        before_ = std::move(before);
    }

    const std::shared_ptr<const Members>& current() const { return members_; }  // null: never heard
    // MEMBERS, with the epoch that is known, as this connection's master counts; 0: none.
    void write_question(Writer& w, uint8_t flags = kMembersTake) const {
        w.number(epoch_);
        w.number(flags);
    }
    uint64_t epoch() const { return epoch_; }
    // The larger the pool, the less often it is asked for; holders of keys come with an epoch all the same.
    bool due(uint64_t now_ms) const {
        constexpr uint64_t kRows = 400;
        uint64_t rows = members_ == nullptr ? 0 : members_->rows.size();
        return !heard_ms_ || now_ms - *heard_ms_ >= fresh_ms_ * std::max<uint64_t>(1, rows / kRows);
    }
    // Whether it names the holders in an answer of that epoch.
    bool fits(uint64_t now_ms, uint64_t epoch) const {
        return members_ != nullptr && epoch_ == epoch && (before_ == nullptr || !due(now_ms));
    }

    // An answer to MEMBERS, up to the newest version, which the caller reads. `before` may change without a
    // change of the list, when the master has become complete; the list is copied then, since callers hold
    // the old one.
    bool read(uint64_t now_ms, Reader& r) {
        auto fresh = std::make_shared<Members>();
        fresh->reading = ++readings_;
        fresh->epoch = r.number<uint64_t>();
        auto flags = r.number<uint8_t>();
        bool changed = (flags & kMembersChanged) != 0;
        if ((flags & kMembersSince) != 0) {
            MemberChanges changes;
            if (!changed || epoch_ == 0 || !changes.read(r)) return false;
            fresh->rows = members_->rows;
            if (!changes.carry_out(fresh->rows)) return false;
        } else if (changed && !read_member_rows(r, fresh->rows)) {
            return false;
        }
        if (!r.ok()) return false;
        if ((flags & kMembersFilling) == 0) before_ = nullptr;
        fresh->before = before_;
        heard_ms_ = now_ms;
        if (!changed && members_ != nullptr && members_->before != fresh->before) {
            fresh->rows = members_->rows;
            changed = true;
        }
        if (changed || members_ == nullptr) {
            epoch_ = fresh->epoch;
            members_ = std::move(fresh);
        }
        return true;
    }

   private:
    const uint64_t fresh_ms_;
    std::shared_ptr<const Members> members_;
    uint64_t epoch_ = 0, readings_ = 0;
    std::optional<uint64_t> heard_ms_;
    std::shared_ptr<const Members> before_;  // members_ of the connection before, while this master fills up
};

}  // namespace moonpool
