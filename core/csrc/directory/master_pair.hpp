// MasterPair: which of two masters does what, without sockets, threads or a clock. MasterServer drives it,
// and the simulator of tests/sim.
//
//   kOwner      serves, and tells its standby
//   kStandby    follows an owner; nodes join once it is whole, clients are refused
//   kActing     a standby whose owner is lost: it answers what it knows, and orders no removals
//   kSuperseded an owner that has heard of a later one: it serves none
//
//   kStandby -> kActing -> kOwner (take_over), kActing -> kStandby (its owner is back)
//   kOwner -> kSuperseded -> kStandby (if it has an owner to follow)
//   kStandby -> kOwner, and the owner -> kSuperseded (hand-over)
//
// A hand-over is asked for by a standby that knows all. The owner begins no order from then on; its callers
// wait. When what was begun is ended, its last frame makes the standby the owner, and when the standby has
// that frame the callers go there. Until the frame is sent the owner can keep its place.
//
// Neither can tell a dead peer from a cut line. So an owner that has lost its standby orders no removals
// before it is told that there is none (go_alone), or one is back; and a standby that has lost its owner
// orders none before it is told to take over. Both answer lookups meanwhile: what the other one knows is no
// newer, unless the line broke when the last frame of a hand-over was on its way. Then the former owner
// answers until a node tells it of the later one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "directory/master.hpp"
#include "directory/master_protocol.hpp"

namespace moonpool {

enum class MasterRole : uint8_t { kOwner, kStandby, kActing, kSuperseded };

struct MasterPairOptions {
    bool is_standby = false;             // it begins as one
    uint32_t take_over_ms = UINT32_MAX;  // of an acting standby, by itself; UINT32_MAX: never
    uint32_t silent_ms = 1000;           // a standby that owes its word for so long is lost
};

class MasterPair {
   public:
    MasterPair(Master& master, const MasterPairOptions& options, uint64_t now_ms);

    // Any thread.
    MasterRole role() const { return role_; }
    bool serves(Caller caller) const;
    bool is_whole() const { return is_whole_; }  // a standby knows all

    // ---- The owner
    using Cut = std::function<void(uint8_t flags)>;  // makes a MIRROR frame for the standby
    void attach(const Cut& cut);                     // a standby asks for all
    void detach(bool left);                          // it is lost, or has left: then none takes over
    bool attached() const { return master_.mirror().attached(); }
    // What an answer waits for: that the standby of that attachment has heard that frame.
    struct Word {
        uint64_t attachment, number;
    };
    bool waits() const { return !alone_; }  // answers that promise something, for such a word
    std::optional<Error> why_no_orders(uint64_t now_ms) const;
    std::optional<Error> why_no_ends(uint64_t now_ms) const;  // of what was ordered
    Word word() const;
    bool is_heard(const Word& word, uint64_t now_ms) const;  // and this owner may acknowledge it
    // The standby has heard more: true, the first time that it knows all.
    bool heard();
    bool is_frame_due(uint64_t now_ms);  // cut(frame_flags()) then
    uint8_t frame_flags() const;
    // Where masters are elected, another one may be entered as the standby, which may take over: the word of
    // this one does not count then.
    void set_word_counts(bool counts, uint64_t now_ms);
    // So it has been for silent_ms, as the election cannot be changed: why_no_orders, also for what waits.
    bool is_unelected(uint64_t now_ms) const;
    bool is_overdue(uint64_t now_ms) const;
    uint64_t lag_ms(uint64_t now_ms) const;
    bool go_alone();  // false: there is a standby, or this is no owner
    // An owner orders nothing from then on, unless this is called again: another master may take over.
    void set_valid_until(uint64_t at_ms) { valid_until_ms_ = at_ms; }
    // ---- The hand-over. told: nodes that have told the standby all they hold. -> why it does not begin.
    std::optional<Error> begin_hand_over(uint64_t now_ms, size_t told);
    bool hands_over() const { return hand_over_ != HandOver::kNone; }  // orders wait
    bool is_given() const { return hand_over_ == HandOver::kSent; }    // and so does all of clients
    bool is_frame_of_hand_over_due(uint64_t now_ms) const;             // cut(frame_flags() | kMirrorYours)
    void frame_of_hand_over_sent();
    bool is_handed_over() const;  // the standby has it, as it or a node says: step_down() then
    bool keep();                  // the owner stays the owner, unless that frame is sent
    bool is_hand_over_late(uint64_t now_ms) const;  // keep() then

    // It has heard of a later owner, and is to step down.
    bool is_superseded() const { return role_ == MasterRole::kOwner && master_.superseded(); }
    void step_down();

    // ---- The standby
    bool begin_to_follow(uint64_t now_ms);  // false: it is the owner
    bool follow(uint64_t now_ms, Reader frame);
    bool lose_owner(uint64_t now_ms);  // true: it is acting now
    bool is_take_over_due(uint64_t now_ms) const;
    // first: as of Master. given: by its owner's last frame. False: it is the owner already.
    bool take_over(uint64_t now_ms, Version first, bool given = false);

   private:
    Master& master_;
    const MasterPairOptions options_;
    std::atomic<MasterRole> role_{MasterRole::kOwner};
    std::atomic<bool> is_whole_{false};
    uint64_t attachment_ = 0;
    bool alone_ = true;  // no standby's word is waited for
    bool word_counts_ = true;
    uint64_t word_counts_not_since_ms_ = 0;  // where it does not
    Version told_closed_ = kNoVersion;
    uint64_t owner_lost_ms_ = 0;
    enum class HandOver { kNone, kClosing, kSent };
    HandOver hand_over_ = HandOver::kNone;
    uint64_t hand_over_since_ms_ = 0, hand_over_frame_ = 0;
    std::atomic<uint64_t> valid_until_ms_{UINT64_MAX};
};

}  // namespace moonpool
