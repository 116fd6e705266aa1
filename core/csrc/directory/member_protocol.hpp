// MemberProtocol: what a node says to its master and does with the answers, without a socket, thread or clock
// of its own: time and frames in, frames out. MemberAgent drives it over its connection, and the simulator of
// tests/sim over a simulated network.
//
//   connected() -> JOIN -> answer -> inventory -> { changes, beats, answers }* -> leave(), or an error
//
// step() sends what is due, and due_ms() says when there is something to do again. An error ends the
// connection; the next one begins with connected().
//
// The log keeps rows from the JOIN on, so that the inventory, which is read piece by piece behind it, is
// complete with them.
//
// applied() is the last removal up to which this node is right: all of which the master knew that they
// concern it are carried out. It goes to the master with BEAT; and each DELTA says up to which removal its
// rows are checked, so that the master finds a copy that was pushed before its node heard of the removal.
// confirmed() is the last one up to which all copies of this node are right, also those of which no answer
// tells that the master had heard. With it the node joins: the master sends what came later.
//
// drops_done_ is the number of drops carried out for this seat; the master repeats all that come after it
// in every answer. It survives a connection, and begins anew with a seat (JOIN that is not resumed). So a
// drop is carried out at least once and confirmed only afterwards.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "directory/delta_log.hpp"
#include "directory/protocol.hpp"
#include "directory/types.hpp"
#include "wire/frame.hpp"

namespace moonpool {

// What the protocol asks of its node. Each gives up by itself when the node does not answer; false ends the
// connection.
struct MemberHooks {
    // The next rows of the inventory, from `cursor` (0: the beginning) on, to `rows`; cursor is 0 again at
    // the end.
    std::function<bool(uint64_t& cursor, std::vector<DeltaRow>& rows)> inventory;
    std::function<bool(NodeLoad& load)> load;
    // Copies that are void: removed or replaced elsewhere. With it the node is right up to drops.upto, unless
    // that is kNoVersion.
    std::function<bool(const Drops& drops)> drop;
    // Up to which removal the node is right, but for copies of which the master may not have heard; up to
    // which it is with those, too; and whether it holds nothing. Any thread.
    std::function<Version()> applied;
    std::function<Version()> confirmed;
    std::function<bool(Version)> confirm;
    std::function<bool()> is_empty;
    // What it knows of removals before that version, for a master that may not know them, from a cursor on
    // (0: the beginning), in the order of their versions. -> up to which it does not know all that it was
    // told.
    std::function<Version(Version before, Version& cursor, std::vector<Drop>& rows)> removals;
    // Whether what it held when it began came from a disk; null: no.
    std::function<bool()> recovered = nullptr;
};

struct MemberCounters {
    std::atomic<uint64_t> joins_total{0}, connect_failures_total{0}, inventories_total{0};
    std::atomic<uint64_t> rows_sent_total{0}, beats_total{0}, dropped_total{0};
    // Answered beats before which the master was told all, and whose answers were whole and are carried out.
    // What the node had when such a beat was due is compared with all removals up to applied().
    std::atomic<uint64_t> settled_total{0};
};

struct MemberProtocolOptions {
    NodeIdentity identity;
    int timeout_ms = 1000;  // of an answer
    int batch_ms = 5;       // changes wait so long for others to go with them, or as the master says
};

class MemberProtocol {
   public:
    using Now = std::function<uint64_t()>;  // ms of a clock that never jumps
    using Send = std::function<Status(std::span<const std::byte> frame)>;

    MemberProtocol(MemberProtocolOptions options, MemberHooks hooks, DeltaLog& log, MemberCounters& counters,
                   Now now);

    // A connection stands: sends JOIN. peer: for errors.
    Status connected(const std::string& peer, Send send);
    // Sends whatever is due.
    Status step();
    uint64_t due_ms() const;  // when step() has something to do; 0: at once
    Status on_frame(const FrameHeader& header, Reader body);
    // The connection is over, or none came about: changes are not kept; the next inventory has them.
    void disconnected();
    // Best effort: a master that takes no bytes now suspects the node, and gives it up later.
    void leave();

    void another_master() { has_joined_ = false; }  // the next connection is to one

    bool told() const { return told_; }            // joined, and its inventory is told over this connection
    NodeId id() const { return id_; }              // of its last incarnation
    uint64_t epoch() const { return epoch_; }      // of the membership, as of the last answer
    uint64_t answers() const { return answers_; }  // so far
    bool large_pool() const { return link_.beats_per_answer > 1; }
    // The next beats tell all changes first, so that MemberCounters::settled_total moves on a busy node, too.
    // Any thread.
    void settle_soon() { flushes_ = kFlushes; }

   private:
    // One connection, from JOIN to its end.
    struct Link {
        std::string peer;
        Send send;
        uint64_t next_request = 1;
        uint32_t beat_ms = 200;
        uint32_t batch_ms = 0;          // that the master asks for
        uint32_t beats_per_answer = 1;  // the others are one-way
        uint32_t beats = 0;             // since one was asked
        uint32_t rows_max = 16384;
        uint64_t next_beat_ms = 0, asked_ms = 0, told_ms = 0;
        bool joined = false;
        bool beat_open = false;     // a BEAT without its answer
        bool beat_settles = false;  // before it the master was told all
        bool asks_now = false;      // with the next one
        bool inventory = false;     // is being told
        bool begun = false;         // and its first frame is sent
        bool versions = false;      // the master knows them
        bool is_empty = false;      // as the JOIN said
        uint64_t cursor = 0;
        Version inventory_applied = kNoVersion;  // its rows are checked up to there
    };

    uint64_t timeout_ms() const { return static_cast<uint64_t>(options_.timeout_ms); }
    uint64_t batch_ms() const {
        return std::max(static_cast<uint64_t>(options_.batch_ms), uint64_t{link_.batch_ms});
    }
    void read_pace(Reader& body);
    void ask_now();
    Status tell_inventory();
    Status tell_changes();
    Status send_rows(const std::vector<DeltaRow>& rows, Version applied, uint8_t first_flags,
                     uint8_t last_flags);
    Status send_beat(bool all_told);
    Status send_removals(Version before);
    Status carry_out(Drops drops);
    Status confirm(Version upto);

    MemberProtocolOptions options_;
    MemberHooks hooks_;
    DeltaLog& log_;
    MemberCounters& counters_;
    Now now_;
    Link link_;
    std::vector<std::byte> out_;
    std::vector<DeltaRow> rows_;
    static constexpr uint32_t kFlushes = 4;
    std::atomic<uint32_t> flushes_{0};  // so many beats tell all changes first
    bool told_ = false;
    uint64_t drops_done_ = 0;
    Version rows_applied_ = kNoVersion;  // when rows were last taken from the log
    // Up to where the node was right with the rows of which no answer tells that the master has them: those
    // sent since the last beat that asks for one, and those before it.
    Version unasked_ = UINT64_MAX, unanswered_ = UINT64_MAX;
    NodeId id_ = kNoNode;
    bool has_joined_ = false;  // this master, since this process began
    uint64_t epoch_ = 0, answers_ = 0;
};

}  // namespace moonpool
