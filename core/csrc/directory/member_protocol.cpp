#include "directory/member_protocol.hpp"

#include <algorithm>
#include <utility>

#include "directory/pace.hpp"
#include "wire/error_frame.hpp"

namespace moonpool {

namespace {

// The master is another process, perhaps of another version: its numbers are brought within bounds that
// cannot stop the caller or make it spin.
uint32_t within_pace(uint32_t beat_ms) { return std::clamp<uint32_t>(beat_ms, 1, 60000); }
constexpr uint32_t kBatchMsMax = 1000;

Error store_is_silent() { return Error{Code::kTimeout, "the node's store did not answer in time"}; }

}  // namespace

MemberProtocol::MemberProtocol(MemberProtocolOptions options, MemberHooks hooks, DeltaLog& log,
                               MemberCounters& counters, Now now)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      log_(log),
      counters_(counters),
      now_(std::move(now)) {}

Status MemberProtocol::connected(const std::string& peer, Send send) {
    link_ = Link{};
    link_.peer = peer;
    link_.send = std::move(send);
    told_ = false;
    // Asked first: it waits while another process takes over, and load() then says whether that one has the
    // node now. A JOIN behind its own would take its place. What is put from then on is right up to here.
    link_.inventory_applied = hooks_.applied();
    link_.is_empty = hooks_.is_empty();
    NodeLoad load;
    if (!hooks_.load(load)) return store_is_silent();
    out_.clear();
    size_t at = begin_frame(out_, Kind::kJoin, 0, link_.next_request++);
    Writer w(out_);
    write_identity(w, options_.identity);
    write_load(w, load);
    write_event_endpoints(w, options_.identity);
    w.number(link_.is_empty ? UINT64_MAX : hooks_.confirmed());
    if (!link_.is_empty && !has_joined_ && hooks_.recovered && hooks_.recovered()) w.number(kJoinRecovered);
    finish_frame(out_, at);
    link_.asked_ms = now_();
    return link_.send(out_);
}

Status MemberProtocol::step() {
    uint64_t now = now_();
    bool waits = !link_.joined || link_.beat_open;
    if (waits && now - link_.asked_ms > timeout_ms()) {
        return Error{Code::kTimeout, "the master at " + link_.peer + " did not answer in time"};
    }
    if (!link_.joined) return success();
    if (now >= link_.next_beat_ms && !link_.beat_open) {
        bool all_told = log_.is_taken();
        if (flushes_ != 0 && !link_.inventory) {
            --flushes_;
            if (Status status = tell_changes(); !status) return status;
            all_told = true;
        }
        if (Status status = send_beat(all_told); !status) return status;
    }
    if (link_.inventory) {
        if (Status status = tell_inventory(); !status) return status;
    }
    // A full frame goes at once; fewer rows wait for up to batch_ms, so that a busy store sends some large
    // frames and not many small ones.
    if (log_.size() >= link_.rows_max || now - link_.told_ms >= batch_ms()) return tell_changes();
    return success();
}

// Next: the answer, the next beat, the end of the batch, or the first row of one. While an inventory is being
// told, answers are looked at between two pieces, without a wait.
uint64_t MemberProtocol::due_ms() const {
    if (link_.inventory) return 0;
    bool waits = !link_.joined || link_.beat_open;
    uint64_t due = waits ? link_.asked_ms + timeout_ms() + 1 : link_.next_beat_ms;
    if (link_.joined && log_.size() != 0) due = std::min(due, link_.told_ms + batch_ms());
    return due;
}

void MemberProtocol::leave() {
    if (!link_.joined) return;
    out_.clear();
    size_t at = begin_frame(out_, Kind::kLeave, kFlagOneWay, 0);
    finish_frame(out_, at);
    (void)link_.send(out_);
}

void MemberProtocol::disconnected() {
    link_.joined = false;
    unasked_ = unanswered_ = UINT64_MAX;
    log_.pause();
}

// One beat at a time is open: the next one is due only after the answer, or the time limit that step() sets
// on it.
Status MemberProtocol::send_beat(bool all_told) {
    NodeLoad load;
    if (!hooks_.load(load)) return store_is_silent();
    out_.clear();
    // Asked at once where the master waits for something, or may have more.
    bool asks = ++link_.beats >= link_.beats_per_answer || link_.asks_now;
    size_t at = asks ? begin_frame(out_, Kind::kBeat, 0, link_.next_request++)
                     : begin_frame(out_, Kind::kBeat, kFlagOneWay, 0);
    Writer w(out_);
    w.number(drops_done_);
    write_load(w, load);
    w.number(hooks_.applied());
    finish_frame(out_, at);
    link_.next_beat_ms = now_() + link_.beat_ms;
    if (asks) {
        unanswered_ = std::min(unanswered_, std::exchange(unasked_, UINT64_MAX));
        link_.beat_open = true;
        link_.asks_now = false;
        link_.beats = 0;
        link_.asked_ms = now_();
        link_.beat_settles = all_told && told_ && !link_.inventory;
    }
    counters_.beats_total.fetch_add(1);
    return link_.send(out_);
}

// One piece. It is sent before any change that comes later is taken from the log; so the last word about a
// key is always the latest one.
Status MemberProtocol::tell_inventory() {
    rows_.clear();
    if (!hooks_.inventory(link_.cursor, rows_)) return store_is_silent();
    bool last = link_.cursor == 0;
    // A piece of the store without rows needs no frame, except the first and the last, which carry the
    // flags.
    if (rows_.empty() && !last && link_.begun) return success();
    Status sent =
        send_rows(rows_, link_.inventory_applied, link_.begun ? 0 : kDeltaBegin, last ? kDeltaEnd : 0);
    link_.begun = true;
    if (!sent || !last) return sent;
    link_.inventory = false;
    counters_.inventories_total.fetch_add(1);
    ask_now();  // the answer says what to drop
    told_ = true;
    return success();
}

Status MemberProtocol::tell_changes() {
    rows_.clear();
    link_.told_ms = now_();
    const Version applied_now = hooks_.applied();  // before the rows: another master's answers move it, too
    // The log overflowed and has lost changes. Only another inventory makes the master's rows exact again;
    // the rows of the former one count until its end.
    if (!log_.take(rows_)) {
        log_.begin_inventory();
        // The lost rows are among its own, and so is what the one before it had yet to tell.
        const Version before = link_.inventory ? link_.inventory_applied : UINT64_MAX;
        link_.inventory_applied = std::min(before, rows_applied_);
        link_.inventory = true;
        link_.begun = false;
        link_.cursor = 0;
        return success();
    }
    // What was pushed since the log was last taken was pushed when the node was right up to then, at least.
    Version applied = std::exchange(rows_applied_, applied_now);
    return rows_.empty() ? success() : send_rows(rows_, applied, 0, 0);
}

// At least one frame, even without rows: its flags mark the begin or the end of an inventory.
Status MemberProtocol::send_rows(const std::vector<DeltaRow>& rows, Version applied, uint8_t first_flags,
                                 uint8_t last_flags) {
    if (!rows.empty()) unasked_ = std::min(unasked_, applied);
    size_t sent = 0;
    do {
        size_t n = std::min<size_t>(link_.rows_max, rows.size() - sent);
        auto flags =
            static_cast<uint8_t>((sent == 0 ? first_flags : 0) | (sent + n == rows.size() ? last_flags : 0));
        out_.clear();
        out_.reserve(sizeof(FrameHeader) + 16 + n * kDeltaRowBytes);
        size_t at = begin_frame(out_, Kind::kDelta, kFlagOneWay, 0);
        Writer w(out_);
        w.number(uint32_t{flags} | (link_.versions ? kDeltaApplied : 0u));
        w.number(static_cast<uint32_t>(n));
        if (link_.versions) w.number(applied);
        for (size_t i = sent; i < sent + n; ++i) write_row(w, rows[i]);
        finish_frame(out_, at);
        if (Status status = link_.send(out_); !status) return status;
        sent += n;
    } while (sent < rows.size());
    counters_.rows_sent_total.fetch_add(rows.size());
    if (out_.capacity() > (1u << 16)) decltype(out_)().swap(out_);
    return success();
}

Status MemberProtocol::on_frame(const FrameHeader& header, Reader body) {
    Error nonsense{Code::kProtocol, link_.peer + " sent an answer that does not fit the question"};
    if (header.kind == Kind::kError) return read_error(body);
    bool joins = header.kind == Kind::kJoin;
    if (!joins && header.kind != Kind::kBeat) return nonsense;
    bool resumed = false, settles = false;
    NodeId id = id_;
    if (joins) {
        id = body.number<NodeId>();
        resumed = (body.number<uint8_t>() & kJoinResumed) != 0;
        body.number<uint8_t>();
        link_.beat_ms = within_pace(body.number<uint32_t>());
        link_.rows_max = std::max<uint32_t>(body.number<uint32_t>(), 1);
    }
    auto epoch = body.number<uint64_t>();
    Drops drops;
    if (!read_drops(body, drops)) return nonsense;
    if (joins) {
        link_.versions = body.left() >= sizeof(Version);
        if (!resumed) drops_done_ = 0;  // another seat, or another master: it counts anew
        id_ = id;
        has_joined_ = true;
        counters_.joins_total.fetch_add(1);
    } else if (header.request_id != 0) {
        link_.beat_open = false;  // else it is one that was not asked, of what is to be dropped at once
        unanswered_ = UINT64_MAX;
        settles = std::exchange(link_.beat_settles, false) && drops.upto != kNoVersion;
        read_pace(body);
    }
    epoch_ = epoch;
    ++answers_;
    uint64_t done = drops_done_;
    const Version upto = drops.upto;
    if (Status status = carry_out(std::move(drops)); !status) return status;
    if (settles) counters_.settled_total.fetch_add(1);
    if (drops_done_ != done) ask_now();  // the master waits to hear it, and may have more
    if (joins) {
        // The log records from before the first piece of the inventory is read; a change that the inventory
        // does not have is therefore in the log.
        rows_applied_ = hooks_.applied();
        log_.begin_inventory();
        // What the node had is right up to where this answer is. An empty node was told of no removal: the
        // master compares what was put since.
        if (!link_.is_empty && upto != kNoVersion) link_.inventory_applied = std::min(rows_applied_, upto);
        link_.joined = link_.inventory = true;
        Version first = link_.versions ? body.number<Version>() : kNoVersion;
        read_pace(body);
        if (link_.versions) {
            if (Status status = send_removals(first); !status) return status;
        }
        ask_now();
    }
    return upto != kNoVersion ? confirm(upto) : success();
}

// The master has compared the rows that it had when it wrote the answer. Rows that it may not have had are
// right up to where the node was when it put their objects. upto first: the store goes on meanwhile.
Status MemberProtocol::confirm(Version upto) {
    upto = std::min({upto, unasked_, unanswered_});
    if (link_.inventory) upto = std::min(upto, link_.inventory_applied);
    if (!log_.is_taken()) upto = std::min(upto, rows_applied_);
    if (upto <= hooks_.confirmed()) return success();
    return hooks_.confirm(upto) ? success() : Status(store_is_silent());
}

void MemberProtocol::ask_now() {
    link_.asks_now = true;
    link_.next_beat_ms = now_();
}

// A master of the release before says nothing of it.
void MemberProtocol::read_pace(Reader& body) {
    if (body.left() < 3 * sizeof(uint32_t)) return;
    link_.batch_ms = std::min(body.number<uint32_t>(), kBatchMsMax);
    link_.beat_ms = within_pace(body.number<uint32_t>());
    link_.beats_per_answer = std::clamp(body.number<uint32_t>(), 1u, Pace::kBeatsPerAnswerMax);
}

// A master that took over, or was restarted, does not know what the former one ordered: the nodes do.
Status MemberProtocol::send_removals(Version before) {
    std::vector<Drop> removals;
    Version cursor = kNoVersion;
    do {
        removals.clear();
        Version complete_since = hooks_.removals(before, cursor, removals);
        if (removals.empty() && complete_since == kNoVersion) return success();
        out_.clear();
        size_t at = begin_frame(out_, Kind::kRemovals, kFlagOneWay, 0);
        Writer w(out_);
        w.number(complete_since);
        w.number(static_cast<uint32_t>(removals.size()));
        for (const Drop& removal : removals) {
            write_hash(w, removal.hash);
            w.number(removal.version);
        }
        finish_frame(out_, at);
        if (Status status = link_.send(out_); !status) return status;
    } while (cursor != kNoVersion);
    return success();
}

// `first` is the number of drops before this list. An overlap with what is done is skipped, because answers
// repeat what is not yet confirmed. When the store does not answer, nothing is confirmed, and the
// connection ends.
Status MemberProtocol::carry_out(Drops drops) {
    uint64_t end = drops.first + drops.items.size();
    bool due = end > drops_done_;
    drops.all = drops.all && drops.first > drops_done_;
    uint64_t skip = !due ? drops.items.size() : drops_done_ > drops.first ? drops_done_ - drops.first : 0;
    drops.items.erase(drops.items.begin(), drops.items.begin() + static_cast<std::ptrdiff_t>(skip));
    if (!due && drops.upto <= hooks_.applied()) return success();
    if (!hooks_.drop(drops)) return store_is_silent();
    counters_.dropped_total.fetch_add(drops.items.size());
    if (due) drops_done_ = end;
    return success();
}

}  // namespace moonpool
