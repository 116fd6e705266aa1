#include "master.hpp"

#include "frames.hpp"
#include "wire/error_frame.hpp"

namespace moonpool::sim {

namespace {

constexpr uint64_t kSilentMs = 1000, kPauseMs = 100;

}  // namespace

void SimMaster::on_start() {
    since_ = world_.now();
    // It ended while it handed over, and its operator sees which one has its place.
    if (owner_ == nullptr && standby_process_ != nullptr && standby_process_->is_owner())
        owner_ = standby_process_;
    master_ = std::make_unique<Master>(limits_, now_ms(), first_version(unix_ms()),
                                       planted_.two_ranges ? Range{} : range_);
    pair_ = std::make_unique<MasterPair>(
        *master_, MasterPairOptions{.is_standby = owner_ != nullptr, .silent_ms = kSilentMs}, now_ms());
    if (owner_ != nullptr) dial_owner();
    tick();
}

void SimMaster::on_end() {
    to_owner_.reset();
    asks_ = false;
    standby_ = kNoLink;
    links_.clear();
    pair_.reset();
    master_.reset();
}

void SimMaster::tick() {
    master_->tick(now_ms());
    for (int i = 0; i < 16 && master_->sweep(); ++i) {
    }
    if (pair_->is_handed_over()) end_hand_over();
    if (pair_->is_superseded() && !planted_.term_ignored) {
        pair_->step_down();
        drop_all(Caller::kClient);
        drop_all(Caller::kNode);
        drop_all(Caller::kStandby);
        if (owner_ != nullptr) dial_owner();
    }
    tell_standby();
    tick_hand_over();
    if (standby_ != kNoLink && pair_->is_overdue(now_ms())) drop(standby_);
    if (to_owner_ != nullptr && now_ms() - owner_heard_ms_ > kSilentMs) lose_owner();
    later(50 * kMs, [this] { tick(); });
}

bool SimMaster::accept(std::shared_ptr<End> end, Caller kind, SimMaster* from) {
    if (pair_ == nullptr || !pair_->serves(kind)) return false;
    LinkId id = next_link_++;
    MasterProtocolHost host{
        .master = *master_,
        .beat_ms = 200,
        .close_link = [this](LinkId link) { drop(link); },
        .on_leave = {},
        .on_join_refused = {},
        .why_no_orders = [this] { return unless_ignored(pair_->why_no_orders(now_ms())); },
        .why_no_ends = [this] { return unless_ignored(pair_->why_no_ends(now_ms())); },
        .on_standby = [this, id, from](const std::string&, const std::string&) -> std::optional<Error> {
            standby_process_ = from;
            attach(id);
            return std::nullopt;
        },
        .on_heard =
            [this] {
                pair_->heard();
                release();
            },
        .on_standby_left = {},
        .on_hand_over = [this](const std::string&,
                               uint32_t told) { return pair_->begin_hand_over(now_ms(), told); }};
    end->on_frame = [this, id](const Bytes& frame) { on_frame(id, frame); };
    end->on_end = [this, id] { drop(id); };
    links_.emplace(id, Link{std::move(end), MasterProtocol(std::move(host), id, kind, "default"), kind, {}});
    return true;
}

std::optional<Error> SimMaster::unless_ignored(std::optional<Error> why) const {
    return planted_.term_ignored ? std::nullopt : why;
}

void SimMaster::drop(LinkId id) {
    auto it = links_.find(id);
    if (it == links_.end()) return;
    it->second.end->close();
    it->second.protocol.closed();
    links_.erase(it);
    if (id == standby_) lose_standby();
}

void SimMaster::drop_all(Caller kind) {
    for (auto it = links_.begin(); it != links_.end();) {
        LinkId id = it->first;
        bool mine = it->second.kind == kind;
        ++it;
        if (mine) drop(id);
    }
}

void SimMaster::on_frame(LinkId id, const Bytes& frame) {
    auto it = links_.find(id);
    if (it == links_.end()) return;
    if (postpones(it->second, frame)) return it->second.postponed.push_back(frame);
    FrameHeader header = header_of(frame);
    uint64_t now = now_ms();
    Bytes out;
    std::shared_ptr<End> end = it->second.end;
    Status status = it->second.protocol.on_frame(now, header, body_of(frame), out);
    if (!status) {
        out.clear();
        write_error(out, status.error().code, status.error().text, 0);
    }
    it = links_.find(id);  // what it asked for may have ended it
    if (it == links_.end()) return;
    Link& link = it->second;
    bool waits =
        link.protocol.promises() && pair_->waits() && !planted_.standby_late && !planted_.term_ignored;
    MasterPair::Word word = pair_->word();
    if (status && !out.empty() && (waits || !link.held.empty())) {
        link.held.push_back({waits ? word : link.held.back().word, std::move(out)});
    } else if (!out.empty()) {
        end->send(std::move(out));
    }
    if (!status) return drop(id);
    if (link.kind != Caller::kStandby) tell_standby();
    release();
    if (pair_->is_handed_over()) end_hand_over();
}

// ---- The owner of a standby

void SimMaster::attach(LinkId id) {
    if (standby_ != kNoLink && standby_ != id) drop(standby_);
    standby_ = id;
    std::shared_ptr<End> end = links_.at(id).end;
    pair_->attach([&](uint8_t flags) {
        Bytes out;
        master_->mirror().cut(now_ms(), master_->mirror_head(flags), out);
        end->send(std::move(out));
    });
}

// ---- The hand-over, as MasterServer and MasterLink do it

bool SimMaster::postpones(const Link& link, const Bytes& frame) const {
    if (link.kind != Caller::kClient || !pair_->hands_over()) return false;
    if (pair_->is_given()) return true;
    if (header_of(frame).kind == Kind::kForget) return true;
    Reader body = body_of(frame);
    return header_of(frame).kind == Kind::kLocate && (LocateHead::read(body).flags & kLocateOrder) != 0;
}

void SimMaster::tick_hand_over() {
    if (!pair_->is_frame_of_hand_over_due(now_ms())) return;
    Bytes out;
    master_->mirror().cut(now_ms(), master_->mirror_head(pair_->frame_flags() | kMirrorYours), out);
    pair_->frame_of_hand_over_sent();
    links_.at(standby_).end->send(std::move(out));
}

void SimMaster::end_hand_over() {
    pair_->step_down();
    owner_ = standby_process_;
    was_given_ = false;
    drop_all(Caller::kClient);
    drop_all(Caller::kNode);
    drop_all(Caller::kStandby);
    dial_owner();
}

void SimMaster::serve_postponed() {
    std::vector<LinkId> all;
    for (auto& [id, link] : links_) all.push_back(id);
    for (LinkId id : all) {
        auto it = links_.find(id);
        if (it == links_.end()) continue;
        for (const Bytes& frame : std::exchange(it->second.postponed, {})) on_frame(id, frame);
    }
}

void SimMaster::lose_standby() {
    standby_ = kNoLink;
    const bool handed_over = pair_->hands_over();
    pair_->detach(false);
    if (pair_->role() != MasterRole::kOwner) return;
    std::vector<LinkId> waiting;
    for (auto& [id, link] : links_) {
        if (!link.held.empty()) waiting.push_back(id);
    }
    for (LinkId id : waiting) drop(id);
    if (handed_over) serve_postponed();
}

void SimMaster::tell_standby() {
    if (!pair_->is_frame_due(now_ms())) return;
    Bytes out;
    master_->mirror().cut(now_ms(), master_->mirror_head(pair_->frame_flags()), out);
    links_.at(standby_).end->send(std::move(out));
}

void SimMaster::release() {
    for (auto& [id, link] : links_) {
        while (!link.held.empty() && pair_->is_heard(link.held.front().word, now_ms())) {
            link.end->send(std::move(link.held.front().frames));
            link.held.pop_front();
        }
    }
}

// ---- The standby: as StandbyAgent, without its thread

void SimMaster::dial_owner() {
    uint64_t dial = ++dials_;
    network_.dial(
        *this, *owner_,
        [this](std::shared_ptr<End> end) { return owner_->accept(std::move(end), Caller::kStandby, this); },
        [this, dial](std::shared_ptr<End> end) {
            if (dial != dials_) {
                if (end != nullptr) end->close();
            } else if (end != nullptr) {
                on_owner(std::move(end));
            } else {
                lose_owner();
            }
        });
    later(kSecond, [this, dial] {
        if (dial == dials_ && to_owner_ == nullptr) lose_owner();
    });
}

void SimMaster::on_owner(std::shared_ptr<End> end) {
    if (pair_->role() == MasterRole::kOwner) return end->close();
    drop_all(Caller::kClient);
    drop_all(Caller::kNode);
    pair_->begin_to_follow(now_ms());
    to_owner_ = std::move(end);
    owner_heard_ms_ = now_ms();
    auto mine = [this, raw = to_owner_.get()] { return to_owner_.get() == raw; };
    to_owner_->on_frame = [this, mine](const Bytes& frame) {
        if (!mine()) return;
        owner_heard_ms_ = now_ms();
        if (header_of(frame).kind == Kind::kHandOver) return;  // it does not hand over
        Reader head = body_of(frame);
        uint64_t number = MirrorHead::read(head).number;
        if (header_of(frame).kind != Kind::kMirror || !follow(frame)) return lose_owner();
        Bytes out;
        size_t at = begin_frame(out, Kind::kMirrored, kFlagOneWay, 0);
        Writer(out).number(number);
        finish_frame(out, at);
        to_owner_->send(std::move(out));
        if (!std::exchange(asks_, false)) return;
        Bytes ask;
        at = begin_frame(ask, Kind::kHandOver, kFlagOneWay, 0);
        Writer w(ask);
        w.text16("the standby");
        w.number(static_cast<uint32_t>(master_->told()));
        finish_frame(ask, at);
        to_owner_->send(std::move(ask));
    };
    to_owner_->on_end = [this, mine] {
        if (mine()) lose_owner();
    };
    Bytes hello;
    size_t at = begin_frame(hello, Kind::kMirror, kFlagOneWay, 0);
    Writer(hello).text16("standby");
    finish_frame(hello, at);
    to_owner_->send(std::move(hello));
}

bool SimMaster::follow(const Bytes& frame) {
    Reader head = body_of(frame);
    const bool is_given = (MirrorHead::read(head).flags & kMirrorYours) != 0;
    if (is_given && pair_->role() == MasterRole::kOwner) return true;
    if (!pair_->follow(now_ms(), body_of(frame))) return false;
    if (!is_given) return true;
    pair_->take_over(now_ms(), first_version(unix_ms()), true);
    owner_ = nullptr;
    was_given_ = true;
    return true;
}

void SimMaster::lose_owner() {
    if (to_owner_ != nullptr) to_owner_->close();
    to_owner_.reset();
    ++dials_;
    if (pair_->role() == MasterRole::kOwner || owner_ == nullptr) return;
    pair_->lose_owner(now_ms());
    later(kPauseMs * kMs, [this] {
        if (pair_->role() != MasterRole::kOwner && to_owner_ == nullptr && owner_ != nullptr) dial_owner();
    });
}

void SimMaster::take_over() {
    if (!running() || pair_->role() == MasterRole::kOwner) return;
    if (to_owner_ != nullptr) lose_owner();
    pair_->take_over(now_ms(), first_version(unix_ms()));
}

}  // namespace moonpool::sim
