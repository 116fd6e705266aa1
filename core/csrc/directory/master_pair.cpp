#include "directory/master_pair.hpp"

#include <algorithm>
#include <utility>

namespace moonpool {

namespace {

constexpr uint64_t kHeartbeatMs = 100;  // a frame without records, so that the standby knows that it is alone
constexpr uint64_t kClosingMs = 150;    // that what was begun has to come to its end; clients wait longer
constexpr uint64_t kHandOverMs = 2000;  // until the frame that ends the hand-over has to be sent

}  // namespace

MasterPair::MasterPair(Master& master, const MasterPairOptions& options, uint64_t now_ms)
    : master_(master), options_(options) {
    if (!options.is_standby) return;
    role_ = MasterRole::kStandby;
    master_.begin_to_follow(now_ms);
}

bool MasterPair::serves(Caller caller) const {
    switch (role_.load()) {
        case MasterRole::kOwner:
            return true;
        case MasterRole::kStandby:
            return caller == Caller::kNode && is_whole_;
        case MasterRole::kActing:
            return caller != Caller::kStandby;
        case MasterRole::kSuperseded:
            break;
    }
    return false;
}

// ---- The owner

void MasterPair::attach(const Cut& cut) {
    ++attachment_;
    hand_over_ = HandOver::kNone;
    told_closed_ = kNoVersion;
    master_.begin_mirror(cut);
}

void MasterPair::detach(bool left) {
    master_.mirror().detach();
    alone_ |= left;
    hand_over_ = HandOver::kNone;
}

// What was begun may end also without the standby, which knows of it.
std::optional<Error> MasterPair::why_no_ends(uint64_t now_ms) const {
    if (role_ != MasterRole::kOwner) {
        return Error{
            Code::kUnavailable,
            "the master is lost; its standby, which answers, orders no removals before it is told to "
            "take over (moonpool promote)"};
    }
    if (now_ms < valid_until_ms_) return std::nullopt;
    return Error{
        Code::kUnavailable,
        "the master has no standby, and could not renew its lease in time: another one may have taken "
        "over; it orders no removals before it has"};
}

std::optional<Error> MasterPair::why_no_orders(uint64_t now_ms) const {
    if (std::optional<Error> why = why_no_ends(now_ms)) return why;
    if (is_unelected(now_ms)) {
        return Error{
            Code::kUnavailable,
            "the election does not name the standby that the master has, and could not be changed for " +
                std::to_string(options_.silent_ms) +
                " ms, as where etcd is away; the master orders no removals before it is"};
    }
    if (alone_ || attached()) return std::nullopt;
    return Error{Code::kUnavailable,
                 "the standby of the master is lost, and may take over; the master orders no removals before "
                 "that is back, or it is told that there is none (moonpool promote)"};
}

// With what is recorded and not cut yet.
MasterPair::Word MasterPair::word() const {
    const Mirror& mirror = master_.mirror();
    return {attachment_, mirror.last() + (mirror.has_records() ? 1 : 0)};
}

bool MasterPair::is_heard(const Word& word, uint64_t now_ms) const {
    if (now_ms >= valid_until_ms_) return false;
    if (alone_) return true;
    if (!word_counts_) return false;
    const Mirror& mirror = master_.mirror();
    if (word.attachment != attachment_) return mirror.whole();  // a later standby began with all of that
    return mirror.attached() && mirror.has_heard(word.number);
}

bool MasterPair::heard() { return master_.mirror().whole() && std::exchange(alone_, false); }

void MasterPair::set_word_counts(bool counts, uint64_t now_ms) {
    if (word_counts_ && !counts) word_counts_not_since_ms_ = now_ms;
    word_counts_ = counts;
}

bool MasterPair::is_unelected(uint64_t now_ms) const {
    return role_ == MasterRole::kOwner && !alone_ && attached() && !word_counts_ &&
           now_ms - word_counts_not_since_ms_ > options_.silent_ms;
}

bool MasterPair::is_frame_due(uint64_t now_ms) {
    const Mirror& mirror = master_.mirror();
    if (!mirror.attached()) return false;
    Version closed = master_.mirror_head(0).closed;
    bool news = mirror.has_records() || closed != std::exchange(told_closed_, closed);
    return news || now_ms - mirror.cut_at_ms() >= kHeartbeatMs;
}

uint8_t MasterPair::frame_flags() const { return master_.mirror().whole() ? kMirrorWhole : uint8_t{0}; }

uint64_t MasterPair::lag_ms(uint64_t now_ms) const {
    std::optional<uint64_t> since = master_.mirror().waits_since_ms();
    return since ? now_ms - std::min(now_ms, *since) : 0;
}

bool MasterPair::is_overdue(uint64_t now_ms) const { return lag_ms(now_ms) > options_.silent_ms; }

bool MasterPair::go_alone() {
    if (role_ != MasterRole::kOwner || attached()) return false;
    alone_ = true;
    return true;
}

// A client that has ended, or is slow, does not keep the standby from it: what it began counts as carried
// out, as after any take-over.
std::optional<Error> MasterPair::begin_hand_over(uint64_t now_ms, size_t told) {
    if (role_ != MasterRole::kOwner || !attached() || !master_.mirror().whole())
        return Error{Code::kUnavailable, "this master has no standby that knows all"};
    if (const uint64_t left_ms = master_.new_for_ms(now_ms); left_ms != 0) {
        return Error{Code::kUnavailable,
                     "nodes that know of removals by a former master may have yet to join "
                     "this one; ask again in " +
                         std::to_string(left_ms) + " ms"};
    }
    const Membership& members = master_.membership();
    if (const size_t all = members.size() - members.suspects(); told < all) {
        return Error{Code::kUnavailable, "of " + std::to_string(all) + " nodes " + std::to_string(told) +
                                             " have told the standby what they hold; ask again when all "
                                             "have (moonpool status shows what keeps them)"};
    }
    if (hand_over_ != HandOver::kNone) return std::nullopt;
    hand_over_ = HandOver::kClosing;
    hand_over_since_ms_ = now_ms;
    return std::nullopt;
}

bool MasterPair::is_frame_of_hand_over_due(uint64_t now_ms) const {
    return hand_over_ == HandOver::kClosing &&
           (master_.open() == 0 || now_ms - hand_over_since_ms_ >= kClosingMs);
}

void MasterPair::frame_of_hand_over_sent() {
    hand_over_ = HandOver::kSent;
    hand_over_frame_ = master_.mirror().last();
}

bool MasterPair::is_handed_over() const {
    return hand_over_ == HandOver::kSent &&
           (master_.mirror().has_heard(hand_over_frame_) || master_.superseded());
}

bool MasterPair::keep() {
    if (hand_over_ != HandOver::kClosing) return false;
    hand_over_ = HandOver::kNone;
    return true;
}

bool MasterPair::is_hand_over_late(uint64_t now_ms) const {
    return hand_over_ == HandOver::kClosing && now_ms - hand_over_since_ms_ >= kHandOverMs;
}

void MasterPair::step_down() {
    hand_over_ = HandOver::kNone;
    role_ = MasterRole::kSuperseded;
    is_whole_ = false;
    master_.step_down();
    master_.mirror().detach();
}

// ---- The standby

// Nodes tell all anew: what they told while this master could not compare it with the order of removals does
// not count.
bool MasterPair::begin_to_follow(uint64_t now_ms) {
    if (role_ == MasterRole::kOwner) return false;
    role_ = MasterRole::kStandby;
    is_whole_ = false;
    master_.begin_to_follow(now_ms);
    return true;
}

bool MasterPair::follow(uint64_t now_ms, Reader frame) {
    if (role_ != MasterRole::kStandby || !master_.follow(now_ms, frame)) return false;
    is_whole_ = master_.is_whole();
    return true;
}

bool MasterPair::lose_owner(uint64_t now_ms) {
    if (role_ != MasterRole::kStandby || !is_whole_) return false;
    role_ = MasterRole::kActing;
    owner_lost_ms_ = now_ms;
    return true;
}

bool MasterPair::is_take_over_due(uint64_t now_ms) const {
    return role_ == MasterRole::kActing && options_.take_over_ms != UINT32_MAX &&
           now_ms - owner_lost_ms_ >= options_.take_over_ms;
}

bool MasterPair::take_over(uint64_t now_ms, Version first, bool given) {
    if (role_ == MasterRole::kOwner) return false;
    master_.take_over(now_ms, first, given);
    role_ = MasterRole::kOwner;
    alone_ = true;
    return true;
}

}  // namespace moonpool
