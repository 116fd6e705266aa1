// Mirror: how a standby master follows its owner, the master that serves. Nodes tell both what they hold, so
// what is mirrored is the order of removals and replacements alone: each removal, which are begun and not
// ended, who was told, and where replacements put their bytes. Pure.
//
//   owner: Master writes records -> Mirror::cut() makes a MIRROR frame -> the standby's link
//   standby: MIRROR frame -> Master::follow() -> MIRRORED, with the frame's number
//
// The owner gives no removal its place before the standby has heard of it (MasterProtocol::promises), and
// lets no node believe that it is right up to a removal whose end the standby has not heard of
// (closed_heard).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "directory/protocol.hpp"
#include "directory/removal_log.hpp"
#include "wire/auth.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline constexpr uint8_t kMirrorBegins = 1;  // what the standby knew before is void
inline constexpr uint8_t kMirrorWhole = 2;   // with this frame it knows all
inline constexpr uint8_t kMirrorYours = 4;   // with this frame it is the owner, and the sender is not
inline constexpr uint8_t kMirrorGives = 8;   // the owner knows HAND_OVER; one of the release before does not

// HAND_OVER back to the standby that asked for it: why it stays one.
inline void write_hand_over_refusal(std::vector<std::byte>& out, const Error& why) {
    size_t at = begin_frame(out, Kind::kHandOver, kFlagOneWay, 0);
    write_error_body(Writer(out), why.code, why.text);
    finish_frame(out, at);
}

// At the begin of each MIRROR frame; its records follow.
struct MirrorHead {
    uint64_t number = 0;
    uint8_t flags = 0;
    Version first = kNoVersion, newest = kNoVersion;  // of the owner
    Version closed = kNoVersion;                      // Master::closed(), by its own count
    Version complete_since = kNoVersion;              // of its RemovalLog

    void write(Writer& w) const;
    static MirrorHead read(Reader& r);
};

enum class MirrorRecord : uint8_t {
    kRemoval = 1,  // hash, u64 version, u64 place, u8 of_absent
    kOpen = 2,     // u64 first, u64 last
    kPlaced = 3,   // hash, incarnation, u64 version, u8 here
    kEnded = 4,    // u64 first, u32 n, u16 nodes, an incarnation each, n hashes, told and placed bits
};

// What a kEnded record says: an Ordered whose nodes are named by their incarnations.
struct MirrorEnded {
    Ordered done;  // its epoch and nodes mean nothing
    std::vector<Incarnation> nodes;

    void write(Writer& w) const;
    static std::optional<MirrorEnded> read(Reader& r);
};

// The owner's side.
class Mirror {
   public:
    // A standby asks for all. closed: what nodes may have heard already.
    void attach(Version closed) {
        *this = Mirror();
        attached_ = true;
        closed_heard_ = closed;
    }
    void detach() { *this = Mirror(); }
    bool attached() const { return attached_; }
    bool whole() const { return whole_; }  // the standby has heard all: answers wait for its word

    // What happened, in its order; nothing is kept without a standby.
    void removal(const Hash128& hash, const Removal& removal);
    void open(Version first, Version last);
    void placed(const Hash128& hash, const Incarnation& node, Version version, bool here);
    void ended(const MirrorEnded& ended);

    bool has_records() const { return !records_.empty(); }
    size_t bytes() const { return records_.size(); }
    // Appends a MIRROR frame with the records so far; head.number is given here.
    void cut(uint64_t now_ms, MirrorHead head, std::vector<std::byte>& out);
    bool heard(uint64_t number);  // false: no such frame is on its way

    uint64_t last() const { return last_; }  // frame that was cut
    bool has_heard(uint64_t number) const { return number <= heard_; }
    Version closed_heard() const { return closed_heard_; }
    // Since when the standby owes its word; nothing: it does not.
    std::optional<uint64_t> waits_since_ms() const {
        return unheard_.empty() ? std::nullopt : std::optional(unheard_.front().at_ms);
    }
    uint64_t cut_at_ms() const { return cut_at_ms_; }

   private:
    Writer record(MirrorRecord kind) {
        Writer w(records_);
        w.number(static_cast<uint8_t>(kind));
        return w;
    }

    struct Unheard {
        uint64_t number, at_ms;
        Version closed;
        bool whole;
    };

    bool attached_ = false, whole_ = false;
    std::vector<std::byte> records_;
    std::deque<Unheard> unheard_;
    uint64_t last_ = 0, heard_ = 0, cut_at_ms_ = 0;
    Version closed_heard_ = kNoVersion;
};

}  // namespace moonpool
