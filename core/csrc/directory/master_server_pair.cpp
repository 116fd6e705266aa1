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

// ---- The owner

MasterLink* MasterServer::standby_link() const {
    auto it = links_.find(standby_fd_);
    return it == links_.end() ? nullptr : it->second.get();
}

// A standby that comes again takes the place of its own former connection.
std::optional<Error> MasterServer::attach_standby(MasterLink& link, const std::string& name) {
    int fd = link.fd();
    if (standby_fd_ >= 0 && standby_fd_ != fd && standby_name_ != name) {
        return Error{Code::kUnavailable, "this master has a standby already: " + standby_name_};
    }
    if (int before = std::exchange(standby_fd_, fd); before >= 0 && before != fd) drop(before);
    standby_name_ = name;
    pair_.attach([&](uint8_t flags) { link.write_mirror(now_ms(), flags); });
    journal_->note(Level::kInfo, "standby_attached", link.peer(), "the standby " + name + " asks for all");
    return std::nullopt;
}

void MasterServer::lose_standby(const std::string& why) {
    standby_fd_ = -1;
    pair_.detach(std::exchange(standby_left_, false));
    if (!pair_.waits()) {
        journal_->note(Level::kInfo, "standby_left", "", "the standby has left");
        return release();
    }
    metrics_.standbys_lost_total.fetch_add(1);
    std::optional<Error> refusal = pair_.why_no_orders(now_ms());
    journal_->note(Level::kWarning, "standby_lost", "",
                   "the standby is lost: " + why +
                       "; no removal is ordered until it is back, or this master "
                       "is told that there is none (moonpool promote)");
    // Their clients hear now that nothing is promised, not at their deadlines.
    for (int fd : std::vector<int>(holding_.begin(), holding_.end())) {
        auto it = links_.find(fd);
        if (it == links_.end() || !refusal) continue;
        std::shared_ptr<MasterLink> link = it->second;
        if (!link->refuse_held(*refusal)) drop(fd);
        holding_.erase(fd);
    }
}

// After each frame that was served, and every tick.
void MasterServer::tell_standby(uint64_t now) {
    if (!pair_.is_frame_due(now)) return;
    MasterLink* link = standby_link();
    link->write_mirror(now, pair_.frame_flags());
    if (!link->send()) drop(standby_fd_);
}

void MasterServer::hear_standby() {
    if (pair_.heard()) {
        journal_->note(Level::kInfo, "standby_whole", standby_link()->peer(),
                       "the standby knows all; removals wait for its word");
    }
    release();
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

// ---- Both

void MasterServer::tick_pair(uint64_t now) {
    bool stood_still = now - std::exchange(ticked_ms_, now) > kStoodStillMs;  // what came meanwhile is unread
    if (pair_.is_superseded()) return serve_no_longer();
    tell_standby(now);
    if (!stood_still && standby_fd_ >= 0 && pair_.is_overdue(now)) drop(standby_fd_);
    if (pair_.is_take_over_due(now)) take_over_now(now);
}

void MasterServer::serve_no_longer() {
    pair_.step_down();
    const Error why = not_served();
    journal_->note(Level::kError, "superseded", "", why.text + "; it serves no longer");
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
    to.tls = options_.owner_tls;
    to.silent_ms = static_cast<int>(options_.pair.silent_ms);
    StandbyHooks hooks;
    hooks.owner = [this] { return pair_.role() == MasterRole::kOwner ? std::string() : owner(); };
    hooks.begin = [this] { return begin_to_follow(); };
    hooks.follow = [this](Reader frame, uint64_t& number) {
        // Copied, as the loop may come to it after this thread has given up.
        std::string_view bytes = frame.bytes(frame.left());
        auto copy = std::make_shared<std::vector<std::byte>>(bytes.size());
        std::memcpy(copy->data(), bytes.data(), bytes.size());
        Reader head{std::span<const std::byte>(*copy)};
        number = MirrorHead::read(head).number;
        auto followed = std::make_shared<bool>(false);
        bool done = call_on_loop([this, copy, followed] {
            bool was_whole = pair_.is_whole();
            *followed = pair_.follow(now_ms(), Reader(std::span<const std::byte>(*copy)));
            if (*followed && pair_.is_whole() && !was_whole) {
                journal_->note(Level::kInfo, "standby_whole", owner(),
                               "this standby knows all that its owner knows");
            }
        });
        return done && *followed;
    };
    hooks.lost = [this](const std::string& why) { call_on_loop([this, why] { lose_owner(why); }); };
    agent_ = std::make_unique<StandbyAgent>(std::move(to), std::move(hooks));
}

bool MasterServer::begin_to_follow() {
    auto begun = std::make_shared<bool>(false);
    bool done = call_on_loop([this, begun] {
        if (pair_.role() == MasterRole::kOwner) return;
        const Error why{Code::kUnavailable, standby_of(owner())};
        drop_all(Caller::kClient, why);
        drop_all(Caller::kNode, why);
        *begun = pair_.begin_to_follow(now_ms());
    });
    return done && *begun;
}

void MasterServer::lose_owner(const std::string& why) {
    uint64_t now = now_ms();
    if (!pair_.lose_owner(now)) return;
    journal_->note(Level::kWarning, "owner_lost", owner(),
                   "the owner is lost: " + why + "; lookups are answered here");
    if (pair_.is_take_over_due(now)) take_over_now(now);
}

bool MasterServer::take_over_now(uint64_t now) {
    if (!pair_.take_over(now, first_version(clock_ms()))) return false;
    metrics_.takeovers_total.fetch_add(1);
    journal_->note(Level::kWarning, "taken_over", owner(), "has taken over from its owner");
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
        owner_ = owner;
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
