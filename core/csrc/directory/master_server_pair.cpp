// MasterServer, as one of two masters (MasterPair): the sockets and the journal of it. All of it runs on the
// loop but the hooks of the StandbyAgent, which call it.
#include <chrono>
#include <cstring>
#include <utility>

#include "directory/master_link.hpp"
#include "directory/master_server.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kStoodStillMs = 500;
constexpr uint64_t kAskAgainMs = 100;  // for the owner's place, after a refusal
constexpr uint64_t kUnheardMs = 1000;  // a question without an answer: what the owner said before is old

uint64_t clock_ms() {
    auto now = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

std::string standby_of(const std::string& owner) {
    return "this master is a standby" + (owner.empty() ? "" : " of " + owner);
}

}  // namespace

Error MasterServer::not_served() const {
    bool superseded = pair_.role() == MasterRole::kSuperseded;
    return Error{Code::kUnavailable,
                 superseded ? "another master has taken over from this one" : standby_of(owner())};
}

// Where others reach it; empty: it does not know.
std::string MasterServer::own_address() const {
    return options_.advertise.empty() ? listener_->addresses().front() : options_.advertise;
}

// What nodes and clients are to know of this range's masters. The term of a standby is its owner's.
MasterList MasterServer::masters_now() const {
    MasterList list{.term = master_.first(), .of_owner = pair_.role() == MasterRole::kOwner};
    if (list.of_owner) {
        list.add(own_address(), true);
        if (standby_fd_ >= 0) list.add(standby_address_);
        return list;
    }
    list.add(owner_elsewhere());
    if (pair_.role() != MasterRole::kSuperseded) list.add(own_address(), true);
    return list;
}

// For a caller that is refused here. Any thread.
std::string MasterServer::owner_elsewhere() const {
    if (pair_.role() == MasterRole::kOwner) return {};
    MutexLock lock(owner_mutex_);
    return is_master_address(named_owner_) ? named_owner_ : std::string();
}

// ---- The owner

MasterLink* MasterServer::standby_link() const {
    auto it = links_.find(standby_fd_);
    return it == links_.end() ? nullptr : it->second.get();
}

// A standby that comes again takes the place of its own former connection.
std::optional<Error> MasterServer::attach_standby(MasterLink& link, const std::string& name,
                                                  const std::string& address) {
    int fd = link.fd();
    if (standby_fd_ >= 0 && standby_fd_ != fd && standby_name_ != name) {
        return Error{Code::kUnavailable, "this master has a standby already: " + standby_name_};
    }
    if (int before = std::exchange(standby_fd_, fd); before >= 0 && before != fd) drop(before);
    standby_name_ = name;
    standby_address_ = address;
    note_elected();
    const bool handed_over = pair_.hands_over();  // over the former connection
    pair_.attach([&](uint8_t flags) { link.write_mirror(now_ms(), flags); });
    if (handed_over) go_on_serving();
    journal_->note(Level::kInfo, "standby_attached", link.peer(), "the standby " + name + " asks for all");
    return std::nullopt;
}

// Where the election names none, no other master takes over while the owner's lease runs.
void MasterServer::note_elected() {
    pair_.set_word_counts(
        elected_standby_ && (elected_standby_->empty() || *elected_standby_ == standby_name_), now_ms());
}

bool MasterServer::set_elected_standby(std::optional<std::string> name) {
    return call_on_loop([this, name = std::move(name)] {
        elected_standby_ = name;
        note_elected();
        release();
    });
}

void MasterServer::lose_standby(const std::string& why) {
    standby_fd_ = -1;
    const bool handed_over = pair_.hands_over();
    pair_.detach(std::exchange(standby_left_, false));
    if (pair_.role() != MasterRole::kOwner) return;
    if (!pair_.waits()) {
        journal_->note(Level::kInfo, "standby_left", "", "the standby has left");
        release();
        if (handed_over) go_on_serving();
        return;
    }
    metrics_.standbys_lost_total.fetch_add(1);
    std::optional<Error> refusal = pair_.why_no_orders(now_ms());
    journal_->note(Level::kWarning, "standby_lost", "",
                   "the standby is lost: " + why +
                       "; no removal is ordered until it is back, or this master "
                       "is told that there is none (moonpool promote)");
    if (refusal) refuse_held(*refusal);
    if (handed_over) go_on_serving();
}

// Clients hear now that nothing is promised, not at their deadlines.
void MasterServer::refuse_held(const Error& why) {
    for (int fd : std::vector<int>(holding_.begin(), holding_.end())) {
        auto it = links_.find(fd);
        if (it == links_.end()) continue;
        std::shared_ptr<MasterLink> link = it->second;
        if (!link->refuse_held(why)) drop(fd);
        holding_.erase(fd);
    }
}

// After each frame that was served, and every tick.
void MasterServer::tell_standby(uint64_t now) {
    if (pair_.is_frame_due(now)) {
        MasterLink* link = standby_link();
        link->write_mirror(now, pair_.frame_flags());
        if (!link->send()) drop(standby_fd_);
    }
    if (pair_.hands_over()) tick_hand_over(now);
}

void MasterServer::hear_standby() {
    if (pair_.heard()) {
        journal_->note(Level::kInfo, "standby_whole", standby_link()->peer(),
                       "the standby knows all; removals wait for its word");
    }
    release();
    if (pair_.is_handed_over()) end_hand_over();
}

void MasterServer::release() {
    for (int fd : std::vector<int>(holding_.begin(), holding_.end())) {
        auto it = links_.find(fd);
        if (it == links_.end()) continue;
        std::shared_ptr<MasterLink> link = it->second;
        if (!link->released()) {
            drop(fd);
        } else if (!link->holds()) {
            holding_.erase(fd);
        }
    }
}

// ---- The hand-over, of the owner

std::optional<Error> MasterServer::begin_hand_over(const std::string& address, uint32_t told) {
    const bool begun = pair_.hands_over();
    std::optional<Error> why = pair_.begin_hand_over(now_ms(), told);
    if (why || begun) return why;
    heir_ = address;
    journal_->note(Level::kInfo, "hand_over", address, "the standby asks to be the owner; removals wait");
    return std::nullopt;
}

void MasterServer::tick_hand_over(uint64_t now) {
    if (!options_.elected) {
        give_now(now);
    } else if (pair_.is_hand_over_late(now)) {
        keep_now();
    }
}

bool MasterServer::give_now(uint64_t now) {
    if (!pair_.is_frame_of_hand_over_due(now)) return false;
    MasterLink* link = standby_link();
    link->write_mirror(now, pair_.frame_flags() | kMirrorYours);
    pair_.frame_of_hand_over_sent();
    {
        MutexLock lock(owner_mutex_);
        named_owner_ = heir_;
        if (!options_.elected)
            owner_ = heir_;  // that it follows, also where the word for the frame does not arrive
    }
    if (!link->send()) drop(standby_fd_);
    for_each_client([](MasterLink& client) { return client.send(); });  // no more is read from them
    return true;
}

bool MasterServer::keep_now() {
    if (!pair_.keep()) return false;
    journal_->note(Level::kWarning, "hand_over_ended", heir_,
                   "the election did not enter the standby in time; this master stays the owner");
    if (MasterLink* link = standby_link(); link != nullptr) {
        link->refuse_hand_over({Code::kTimeout, "the election did not enter this standby in time"});
        if (!link->send()) drop(standby_fd_);
    }
    go_on_serving();
    return true;
}

// What clients asked meanwhile is answered, or refused.
void MasterServer::go_on_serving() {
    for_each_client([](MasterLink& client) { return client.go_on(); });
}

void MasterServer::for_each_client(const std::function<bool(MasterLink&)>& visit) {
    std::vector<std::shared_ptr<MasterLink>> clients;
    for (const auto& [fd, link] : links_) {
        if (link->kind() == Caller::kClient) clients.push_back(link);
    }
    for (const auto& link : clients) {
        if (links_.contains(link->fd()) && !visit(*link)) drop(link->fd());
    }
}

// Its clients ask the new owner what they have asked here without an answer.
void MasterServer::end_hand_over() {
    pair_.step_down();
    const Error why{Code::kUnavailable, "the master at " + heir_ + " owns the directory now"};
    journal_->note(Level::kInfo, "handed_over", heir_,
                   "the standby is the owner now, and this master follows");
    end_all(why);
}

std::string MasterServer::gives_to() {
    auto name = std::make_shared<std::string>();
    call_on_loop([this, name] {
        if (pair_.is_frame_of_hand_over_due(now_ms())) *name = standby_name_;
    });
    return *name;
}

bool MasterServer::give() {
    auto given = std::make_shared<bool>(false);
    return call_on_loop([this, given] { *given = give_now(now_ms()); }) && *given;
}

bool MasterServer::keep() {
    auto kept = std::make_shared<bool>(false);
    return call_on_loop([this, kept] { *kept = keep_now(); }) && *kept;
}

// ---- The hand-over, of the standby

void MasterServer::settle_ask(Status how) {
    MutexLock lock(ask_mutex_);
    ask_ended_ = std::move(how);
    asked_.notify_all();
}

// What keeps the owner may end (kUnavailable): it is new, or nodes have yet to tell this standby what they
// hold. Not again after kTimeout: meanwhile the owner's callers wait.
Status MasterServer::ask_hand_over(uint32_t timeout_ms) {
    if (pair_.role() != MasterRole::kStandby || !pair_.is_whole())
        return Error{Code::kUnavailable, "this master is no standby that knows all that its owner knows"};
    if (!owner_gives_) {
        return Error{Code::kUnavailable,
                     "the owner at " + owner() +
                         " is of the release before, which does not hand over: stop it, and "
                         "ask again"};
    }
    MutexLock lock(ask_mutex_);
    const uint64_t end_ms = now_ms() + timeout_ms;
    auto wait_until = [&](uint64_t at_ms, auto until) REQUIRES(ask_mutex_) {
        const uint64_t now = now_ms();
        return asked_.wait_for(lock, std::chrono::milliseconds(at_ms - std::min(at_ms, now)), until);
    };
    auto given = [&]() REQUIRES(ask_mutex_) {
        return pair_.role() == MasterRole::kOwner || (ask_ended_ && *ask_ended_);
    };
    Status refused = success();
    for (uint64_t now = now_ms(); now < end_ms && !given(); now = now_ms()) {
        ask_ended_.reset();
        agent_->ask_hand_over(own_address());
        wait_until(end_ms, [&]() REQUIRES(ask_mutex_) { return ask_ended_.has_value(); });
        if (!ask_ended_) {
            if (now_ms() - now > kUnheardMs) refused = success();
            break;
        }
        refused = *ask_ended_;
        if (!refused && refused.error().code != Code::kUnavailable) return refused;
        wait_until(std::min(end_ms, now_ms() + kAskAgainMs), given);
    }
    if (given()) return success();
    agent_->ask_hand_over("");
    if (!refused) return refused;
    return Error{Code::kTimeout,
                 "the owner at " + owner() + " did not hand over in time; ask again, also where it is lost"};
}

// ---- Both

void MasterServer::tick_pair(uint64_t now) {
    bool stood_still = now - std::exchange(ticked_ms_, now) > kStoodStillMs;  // what came meanwhile is unread
    if (pair_.is_handed_over()) return end_hand_over();
    if (pair_.is_superseded()) return serve_no_longer();
    tell_standby(now);
    if (pair_.is_unelected(now) && !holding_.empty()) {
        if (std::optional<Error> why = pair_.why_no_orders(now)) refuse_held(*why);
    }
    if (!stood_still && standby_fd_ >= 0 && pair_.is_overdue(now)) drop(standby_fd_);
    if (pair_.is_take_over_due(now)) take_over_now(now);
}

void MasterServer::serve_no_longer() {
    pair_.step_down();
    {
        // Its last standby alone could take over without its word.
        MutexLock lock(owner_mutex_);
        if (named_owner_.empty()) named_owner_ = standby_address_;
    }
    const Error why = not_served();
    journal_->note(Level::kError, "superseded", "", why.text + "; it serves no longer");
    end_all(why);
}

void MasterServer::end_all(const Error& why) {
    drop_all(Caller::kClient, why);  // first: no answer that waits for the standby's word is given
    drop_all(Caller::kNode, why);
    if (standby_fd_ >= 0) drop(standby_fd_);
}

void MasterServer::drop_all(Caller kind, const Error& why) {
    std::vector<std::shared_ptr<MasterLink>> gone;
    for (const auto& [fd, link] : links_) {
        if (link->kind() == kind) gone.push_back(link);
    }
    for (const auto& link : gone) {
        link->fail(why.code, why.text);
        drop(link->fd());
    }
}

// ---- The standby

void MasterServer::make_agent() {
    StandbyAgentOptions to;
    {
        MutexLock lock(owner_mutex_);
        owner_ = options_.standby_of;
    }
    to.token = options_.token;
    to.range = options_.range;
    to.name = options_.name.empty() ? listener_->addresses().front() : options_.name;
    to.address = own_address();
    to.tls = options_.owner_tls;
    to.silent_ms = static_cast<int>(options_.pair.silent_ms);
    StandbyHooks hooks;
    hooks.owner = [this] { return pair_.role() == MasterRole::kOwner ? std::string() : owner(); };
    hooks.begin = [this](const std::string& address) { return begin_to_follow(address); };
    hooks.follow = [this](Reader frame, uint64_t& number) {
        // Copied, as the loop may come to it after this thread has given up.
        std::string_view bytes = frame.bytes(frame.left());
        auto copy = std::make_shared<std::vector<std::byte>>(bytes.size());
        std::memcpy(copy->data(), bytes.data(), bytes.size());
        Reader head{std::span<const std::byte>(*copy)};
        number = MirrorHead::read(head).number;
        auto followed = std::make_shared<bool>(false);
        bool done = call_on_loop([this, copy, followed] { *followed = follow_frame(*copy); });
        return done && *followed;
    };
    hooks.told = [this] {
        auto told = std::make_shared<uint32_t>(0);
        call_on_loop([this, told] { *told = static_cast<uint32_t>(master_.told()); });
        return *told;
    };
    hooks.refused = [this](Error why) { settle_ask(std::move(why)); };
    hooks.lost = [this](const std::string& why) { call_on_loop([this, why] { lose_owner(why); }); };
    agent_ = std::make_unique<StandbyAgent>(std::move(to), std::move(hooks));
}

bool MasterServer::follow_frame(const std::vector<std::byte>& frame) {
    const uint64_t now = now_ms();
    const Reader bytes{std::span<const std::byte>(frame)};
    Reader head = bytes;
    const uint8_t flags = MirrorHead::read(head).flags;
    const bool is_given = (flags & kMirrorYours) != 0;
    owner_gives_ = (flags & kMirrorGives) != 0;
    // The election may have told this master before its owner did.
    if (is_given && pair_.role() == MasterRole::kOwner) return true;
    const bool was_whole = pair_.is_whole();
    if (!pair_.follow(now, bytes)) return false;
    if (pair_.is_whole() && !was_whole) {
        journal_->note(Level::kInfo, "standby_whole", owner(), "this standby knows all that its owner knows");
    }
    if (is_given) take_over_now(now, true);
    return true;
}

bool MasterServer::begin_to_follow(const std::string& address) {
    auto begun = std::make_shared<bool>(false);
    bool done = call_on_loop([this, begun, address] {
        if (pair_.role() == MasterRole::kOwner) return;
        {
            MutexLock lock(owner_mutex_);
            named_owner_ = address;
        }
        const Error why{Code::kUnavailable, standby_of(owner())};
        drop_all(Caller::kClient, why);
        drop_all(Caller::kNode, why);
        *begun = pair_.begin_to_follow(now_ms());
    });
    return done && *begun;
}

void MasterServer::lose_owner(const std::string& why) {
    uint64_t now = now_ms();
    if (!pair_.lose_owner(now)) {
        const bool is_news = std::exchange(not_followed_, why) != why;
        if (is_news && pair_.role() == MasterRole::kStandby)
            journal_->note(Level::kWarning, "not_following", owner(), "does not follow its owner: " + why);
        return;
    }
    journal_->note(Level::kWarning, "owner_lost", owner(),
                   "the owner is lost: " + why + "; lookups are answered here");
    if (pair_.is_take_over_due(now)) take_over_now(now);
}

bool MasterServer::take_over_now(uint64_t now, bool given) {
    if (!pair_.take_over(now, first_version(clock_ms()), given)) return false;
    {
        MutexLock lock(owner_mutex_);
        named_owner_.clear();
    }
    metrics_.takeovers_total.fetch_add(1);
    settle_ask(success());
    journal_->note(given ? Level::kInfo : Level::kWarning, "taken_over", owner(),
                   given ? "has the place of its owner, which handed over" : "has taken over from its owner");
    return true;
}

bool MasterServer::take_over() {
    auto done = std::make_shared<bool>(false);
    auto take = [this, done] { *done = take_over_now(now_ms()) || (pair_.waits() && pair_.go_alone()); };
    return call_on_loop(take) && *done;
}

bool MasterServer::follow(const std::string& owner) {
    {
        MutexLock lock(owner_mutex_);
        owner_ = named_owner_ = owner;
    }
    return call_on_loop([this] {
        if (pair_.role() == MasterRole::kOwner) serve_no_longer();
    });
}

void MasterServer::set_valid_for(uint64_t ms) {
    uint64_t now = now_ms();
    pair_.set_valid_until(ms > UINT64_MAX - now ? UINT64_MAX : now + ms);
}

MasterServer::Standby MasterServer::standby_now(uint64_t now_ms) const {
    MasterRole role = pair_.role();
    if (role != MasterRole::kOwner)
        return Standby{owner(), role == MasterRole::kStandby && pair_.is_whole(), pair_.is_whole(), 0};
    if (standby_link() == nullptr) return Standby{};
    return Standby{standby_name_, true, master_.mirror().whole(), pair_.lag_ms(now_ms)};
}

MasterServer::Standby MasterServer::standby() {
    auto now = std::make_shared<Standby>();
    call_on_loop([this, now] { *now = standby_now(now_ms()); });
    return *now;
}

}  // namespace moonpool
