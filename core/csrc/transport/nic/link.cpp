#include "transport/nic/link.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "base/clock.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr uint64_t kSpinNs = 200'000;  // a caller polls, before it sleeps
constexpr uint64_t kEagerNs = 3'000;   // and leaves its core to nothing else: so long a NIC takes
constexpr uint64_t kBackOffNs = 500'000'000, kBackOffNsMax = 60'000'000'000;
constexpr uint64_t kSilentNsMax = 10'000'000'000;  // however slow a rail is
constexpr uint64_t kGoodNs = 60'000'000'000;       // of a rail: then it has one fault less
constexpr uint64_t kIdleNs = 60'000'000'000;       // then its connection goes
constexpr uint64_t kAwayNs = 100'000'000;          // rails are looked at every 50 ms by a process that runs
constexpr std::chrono::milliseconds kNap{2};

bool is_uneven(const std::vector<std::unique_ptr<Rail>>& rails) {
    return std::ranges::any_of(
        rails, [&](const auto& rail) { return rail->near.tiers != rails.front()->near.tiers; });
}

}  // namespace

// What a rail tells.
class Link::Watcher final : public EventHandler {
   public:
    explicit Watcher(std::weak_ptr<Link> link) : link_(std::move(link)) {}

    bool on_events(uint32_t) override {
        std::shared_ptr<Link> link = link_.lock();
        if (link == nullptr) return false;
        link->on_completions();
        return true;
    }
    bool on_tick(uint64_t) override {
        std::shared_ptr<Link> link = link_.lock();
        if (link == nullptr) return false;
        link->on_tick();
        return true;
    }

   private:
    const std::weak_ptr<Link> link_;
};

Link::Link(const Context& context, const LinkOptions& options, TransportCounters& counters,
           std::shared_ptr<Keys> keys, std::vector<std::unique_ptr<Rail>> rails,
           std::shared_ptr<Control> control, int timeout_ms)
    : context_(context),
      options_(options),
      counters_(counters),
      keys_(std::move(keys)),
      control_(std::move(control)),
      timeout_ms_(timeout_ms),
      rails_(std::move(rails)),
      uneven_(is_uneven(rails_)) {}

Link::~Link() { options_.links->remove(*this); }

std::shared_ptr<EventHandler> Link::make_watcher() { return std::make_shared<Watcher>(weak_from_this()); }

std::string Link::path() const {
    std::string text = std::string(options_.transport) + " " + rails_.front()->path();
    return rails_.size() == 1 ? text : text + " and " + std::to_string(rails_.size() - 1) + " more";
}

std::string Link::remarks() const {
    MutexLock lock(mutex_);
    std::string text;
    for (const auto& rail : rails_) {
        auto add = [&](const std::string& remark) {
            if (!remark.empty()) text += (text.empty() ? "" : "; ") + (rail->name() + ": ") + remark;
        };
        if (rail->faults > 0 && rail->state != Rail::State::kUp) add(rail->why);
        add(rail->remarks());
    }
    return text;
}

std::vector<RailReport> Link::rails() const {
    static constexpr const char* kStates[] = {"down", "connecting", "up", "ending"};  // as Rail::State
    std::vector<RailReport> reports;
    MutexLock lock(mutex_);
    for (const auto& rail : rails_) {
        const bool up = rail->state == Rail::State::kUp;
        reports.push_back({rail->name(), rail->path(), kStates[static_cast<size_t>(rail->state)],
                           up ? "" : rail->why, rail->bytes_done, rail->pieces_done, rail->faults_total,
                           rail->bytes_per_ns()});
        if (!up && !rail->port_up()) reports.back().why = "the port " + rail->name() + " is down";
    }
    return reports;
}

// Of a card it depends on the region: its keys say.
bool Link::reaches(MemoryKind kind, std::string* why) const {
    if (kind != MemoryKind::kDevice) return reached_by_cpu(kind, why);
    if (why != nullptr) *why = options_.no_card_keys;
    return options_.no_card_keys.empty();
}

// While every rail waits for its next try, jobs go another way at once; but for late bytes that could land
// over theirs: the job that comes here has the peer asked.
bool Link::reaches_nothing() const {
    MutexLock lock(mutex_);
    if (!all_settled()) return false;
    uint64_t now = clock();
    return std::ranges::none_of(rails_, [&](const auto& rail) {
        return rail->state != Rail::State::kDown || (rail->port_up() && rail->retry_ns <= now);
    });
}

void Link::add_task(std::unique_ptr<Task> task) {
    if (spare_nodes_.empty()) {
        tasks_.push_back(std::move(task));
        return;
    }
    spare_nodes_.front() = std::move(task);
    tasks_.splice(tasks_.end(), spare_nodes_, spare_nodes_.begin());
}

Status Link::run(Job& job) {
    MutexLock lock(mutex_);
    if (closed_) return Error{Code::kUnavailable, "the segment was closed"};
    add_task(std::make_unique<Task>(job, nullptr, nullptr));
    Task* task = tasks_.back().get();
    uint64_t now = now_ns(), spin_from = now;
    ++looking_;
    (void)drive(now, false);
    while (!task->over) {
        if (drive(now)) spin_from = now;
        if (task->over) break;
        if (now < spin_from + kSpinNs) {
            tell_ended();
            lock.unlock();
            if (now >= spin_from + kEagerNs) ::sched_yield();  // the other side may be on this core
            lock.lock();
            now = now_ns();
            continue;
        }
        --looking_;
        drive_armed();
        tell_ended();
        changed_.wait_for(lock, task->keyless.empty() ? kSleep : kNap,
                          [&]() REQUIRES(mutex_) { return task->over; });
        ++looking_;
        now = now_ns();
    }
    --looking_;
    if (!tasks_.empty()) drive_armed();
    Status status = std::move(task->status);
    std::erase_if(ended_, [&](const auto& ended) { return ended.get() == task; });
    tell_ended();
    return status;
}

bool Link::post(const std::shared_ptr<Job>& job, const Finished& finished) {
    MutexLock lock(mutex_);
    if (closed_) return false;  // run() says why
    add_task(std::make_unique<Task>(*job, job, finished));
    (void)drive();
    drive_armed();
    tell_ended();
    return true;
}

void Link::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    (void)drive();
    tell_ended();
}

void Link::on_completions() {
    MutexLock lock(mutex_);
    (void)drive();
    drive_armed();
    tell_ended();
}

void Link::on_tick() {
    MutexLock lock(mutex_);
    uint64_t now = clock();
    for (const auto& rail : rails_) {
        if (rail->state != Rail::State::kUp) continue;
        if (rail->faults > 0 && now - rail->good_since_ns > kGoodNs) {
            --rail->faults;
            rail->good_since_ns = now;
        }
        if (!rail->busy() && now - rail->progress_ns() > kIdleNs) stop(*rail, "it was idle", false);
    }
    (void)drive();
    drive_armed();
    tell_ended();
}

Rail* Link::longest_idle(size_t device) const {
    Rail* longest = nullptr;
    for (const auto& rail : rails_) {
        if (rail->device != device || rail->state != Rail::State::kUp || rail->busy()) continue;
        if (longest == nullptr || rail->progress_ns() < longest->progress_ns()) longest = rail.get();
    }
    return longest;
}

uint64_t Link::idle_since(size_t device) const {
    MutexLock lock(mutex_);
    const Rail* rail = longest_idle(device);
    return rail == nullptr ? UINT64_MAX : rail->progress_ns();
}

bool Link::end_idle(size_t device) {
    MutexLock lock(mutex_);
    Rail* rail = longest_idle(device);
    if (rail == nullptr) return false;
    stop(*rail, "another peer needed its connection", false);
    get_help();
    return true;
}

// What completed before the arming is told by no event; what completes later is, also when this looks first.
// While a caller looks by itself, an event would only wake a thread to stand in its way; so would the event
// of the next caller, where nothing is under way now.
void Link::drive_armed() {
    for (const auto& rail : rails_) {
        if (looking_ == 0 && !tasks_.empty() && rail->state == Rail::State::kUp) rail->arm();
    }
    (void)drive();
}

// Of a task of run() its caller takes the status.
void Link::tell_ended() {
    Ended posted;
    for (auto& task : ended_) {
        if (task->owned != nullptr) posted.push_back(std::move(task));
    }
    std::erase(ended_, nullptr);
    if (posted.empty()) return;
    mutex_.unlock();
    for (auto& task : posted) task->finished(task->owned, std::move(task->status));
    posted.clear();
    mutex_.lock();
}

bool Link::drive(uint64_t wall_ns, bool look) {
    wall_ns_ = wall_ns;
    bool settled = false;
    for (const auto& rail : rails_) settled = ((look || rail->busy()) && settle(*rail)) || settled;
    const uint64_t now = options_.nic.clock_ns == &now_ns ? wall_ns : clock();
    // Of a process that did not run meanwhile the clock says nothing about its rails.
    const bool away = now - looked_ns_ > kAwayNs;
    looked_ns_ = now;
    for (const auto& rail : rails_) {
        if (away && rail->busy()) rail->excuse(now);
        watch(*rail, now);
    }
    if (now >= keyless_until_ns_) {
        for (const auto& task : tasks_) {
            for (const Task::Range& range : task->keyless) task->again.push_back(range);
            task->keyless.clear();
        }
    }
    for (bool posted = true; posted;) {
        posted = false;
        for (const auto& rail : rails_) posted = fill(*rail, now) || posted;
        if (!uneven_) break;  // else what a rail has left to a nearer one may be that one's no more
    }
    bool ended = false;
    for (auto it = tasks_.begin(); it != tasks_.end();) {
        if (!may_end(**it, now)) {
            ++it;
            continue;
        }
        (*it)->held.end();
        (*it)->over = ended = true;
        ended_.push_back(std::move(*it));
        auto node = it++;
        if (spare_nodes_.empty()) {
            spare_nodes_.splice(spare_nodes_.end(), tasks_, node);
        } else {
            tasks_.erase(node);
        }
    }
    if (ended) changed_.notify_all();
    if (needs_help(now)) get_help();
    return settled;
}

uint64_t Link::back_off_ns(int faults) { return std::min(kBackOffNs << std::min(faults, 7), kBackOffNsMax); }

bool Link::settle(Rail& rail) {
    if (rail.state != Rail::State::kUp) return false;
    struct {
        Tally tally;
        uint64_t now;
        Rail& rail;
        bool any = false;
    } found{Tally(counters_), wall_ns_, rail};
    // One pointer, lest it should be allocated.
    auto done = [&found](std::span<const Piece> pieces) {
        found.any = true;
        found.rail.pieces_done += pieces.size();
        for (const Piece& piece : pieces) {
            found.rail.bytes_done += piece.bytes;
            piece.task->job.progress_ns.store(found.now, std::memory_order_relaxed);
            piece_done(piece, found.tally);
        }
    };
    std::optional<Rail::Fault> fault = rail.poll(options_.nic.clock_ns, done);
    if (fault) on_fault(rail, *fault);
    return found.any || fault;
}

void Link::on_fault(Rail& rail, const Rail::Fault& fault) {
    bool of_path = true;
    if (fault.piece) {
        Task& task = *fault.piece->task;
        if (fault.of == Rail::Fault::Of::kPeerMemory) {
            of_path = false;
            ++task.refused[fault.piece->slice];
        } else if (fault.of == Rail::Fault::Of::kOwnMemory) {
            of_path = !task.job.locals[fault.piece->slice]->closing();
        }
    }
    stop(rail, fault.why, of_path);
}

void Link::watch(Rail& rail, uint64_t now) {
    if (rail.state != Rail::State::kUp) return;
    if (!rail.port_up()) return stop(rail, "the port " + rail.name() + " is down", true);
    if (closed_) return stop(rail, "the segment was closed", false);
    if (!rail.busy()) return;
    uint64_t silent_ns =
        std::max(silence_ns() * rail.patience(), std::min(8 * rail.expected_ns(), kSilentNsMax));
    if (now > rail.progress_ns() + silent_ns) {
        stop(rail, "nothing moved for " + std::to_string((now - rail.progress_ns()) / 1'000'000) + " ms",
             true);
    }
}

void Link::stop(Rail& rail, const std::string& why, bool of_path) {
    bool writes = false;
    std::vector<Piece> open = rail.stop(writes);
    rail.state = Rail::State::kEnding;
    rail.why = why;
    known_.clear();  // the peer may have deregistered any of it: it is asked for again
    if (of_path) {
        rail.retry_ns = clock() + back_off_ns(rail.faults++);
        ++rail.faults_total;
        for (const auto& task : tasks_) ++task->faults;
    }
    // Not before the peer has ended its side: closed, it does so when the connections to it are.
    if (writes && !closed_) {
        rail.fenced = std::move(open);
        return;
    }
    for (const Piece& piece : open) put_back(piece);
}

}  // namespace moonpool::transport::nic
