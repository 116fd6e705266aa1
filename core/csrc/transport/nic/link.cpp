#include "transport/nic/link.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <thread>

#include "base/clock.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr uint64_t kWholeBytes = 128u << 10;       // a slice up to here is not cut
constexpr uint64_t kBackgroundBytes = 512u << 10;  // open on one rail beside foreground tasks
constexpr uint64_t kSpinNs = 200'000;              // a caller polls, before it sleeps
constexpr uint64_t kBackOffNs = 500'000'000, kBackOffNsMax = 60'000'000'000;
constexpr uint64_t kSilentNsMax = 10'000'000'000;  // however slow a rail is
constexpr uint64_t kAskAgainNs = 100'000'000;      // a peer that did not end its side
constexpr uint64_t kGoodNs = 60'000'000'000;       // of a rail: then it has one fault less
constexpr uint64_t kIdleNs = 60'000'000'000;       // then its connection goes
constexpr uint64_t kKeylessNs = 2'000'000;         // memory that gets its keys is looked at again
constexpr int kFaultsMax = 3;                      // of rails, in one task without another path
constexpr int kRefusedMax = 3;                     // of one slice
// A rail that is far from the memory takes a piece when the near ones would need so many times as long.
constexpr double kFarTimes = 2;
constexpr uint64_t kAwayNs = 100'000'000;  // rails are looked at every 50 ms by a process that runs
constexpr std::chrono::milliseconds kSleep{50}, kNap{2};

bool is_uneven(const std::vector<std::unique_ptr<Rail>>& rails) {
    const Rail::Tiers* first = rails.front()->tiers();
    return std::ranges::any_of(rails, [&](const auto& rail) {
        return rail->tiers() != nullptr && first != nullptr && *rail->tiers() != *first;
    });
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

Link::~Link() = default;

std::string Link::path() const {
    std::string text = std::string(options_.transport) + " " + rails_.front()->path();
    return rails_.size() == 1 ? text : text + " and " + std::to_string(rails_.size() - 1) + " more";
}

bool Link::reaches(MemoryKind kind, std::string* why) const { return reached_by_cpu(kind, why); }

// While every rail waits for its next try, jobs go another way at once.
bool Link::reaches_nothing() const {
    MutexLock lock(mutex_);
    uint64_t now = clock();
    return std::ranges::none_of(rails_, [&](const auto& rail) {
        return rail->state != Rail::State::kDown || (rail->port_up() && rail->retry_ns <= now);
    });
}

Status Link::run(Job& job) {
    MutexLock lock(mutex_);
    if (closed_) return Error{Code::kUnavailable, "the segment was closed"};
    tasks_.push_back(std::make_unique<Task>(job, nullptr, nullptr));
    Task* task = tasks_.back().get();
    uint64_t spin_until = now_ns() + kSpinNs;
    while (!task->over) {
        if (drive()) spin_until = now_ns() + kSpinNs;
        if (task->over) break;
        if (now_ns() < spin_until) {
            tell_ended();
            lock.unlock();
            ::sched_yield();  // the other side may be on this core
            lock.lock();
            continue;
        }
        drive_armed();
        tell_ended();
        if (task->over) break;
        changed_.wait_for(lock, task->keyless.empty() ? kSleep : kNap,
                          [&]() REQUIRES(mutex_) { return task->over; });
    }
    Status status = std::move(task->status);
    std::erase_if(ended_, [&](const auto& ended) { return ended.get() == task; });
    tell_ended();
    return status;
}

bool Link::post(const std::shared_ptr<Job>& job, const Finished& finished) {
    MutexLock lock(mutex_);
    if (closed_) return false;  // run() says why
    tasks_.push_back(std::make_unique<Task>(*job, job, finished));
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

// What completed before the arming is told by no event; what completes later is, also when this looks first.
void Link::drive_armed() {
    for (const auto& rail : rails_) {
        if (rail->state == Rail::State::kUp) rail->arm();
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

bool Link::drive() {
    bool settled = false;
    for (const auto& rail : rails_) settled = settle(*rail) || settled;
    const uint64_t now = clock();
    // Of a process that did not run meanwhile the clock says nothing about its rails.
    const bool away = now - looked_ns_ > kAwayNs;
    looked_ns_ = now;
    for (const auto& rail : rails_) {
        if (away && rail->busy()) rail->excuse(now);
        watch(*rail, now);
    }
    if (now >= keyless_until_ns_) {
        for (const auto& task : tasks_) {
            task->again.insert(task->again.end(), task->keyless.begin(), task->keyless.end());
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
        it = tasks_.erase(it);
    }
    if (ended) changed_.notify_all();
    if (needs_help(now)) get_help();
    return settled;
}

bool Link::settle(Rail& rail) {
    if (rail.state != Rail::State::kUp) return false;
    bool any = false;
    auto done = [&](std::span<const Piece> pieces) REQUIRES(mutex_) {
        any = true;
        uint64_t progress_ns = now_ns();
        for (const Piece& piece : pieces) {
            piece.task->job.progress_ns.store(progress_ns, std::memory_order_relaxed);
            piece_done(piece);
        }
    };
    std::optional<Rail::Fault> fault = rail.poll(options_.nic.clock_ns, done);
    if (fault) on_fault(rail, *fault);
    return any || fault;
}

void Link::piece_done(const Piece& piece) {
    Task& task = *piece.task;
    Job& job = task.job;
    --task.open;
    if (!job.is_waiting(piece.slice)) return;
    const Slice& slice = job.slices[piece.slice];
    if (piece.bytes != slice.length) {
        uint64_t& rest = task.rest.try_emplace(piece.slice, slice.length).first->second;
        rest -= piece.bytes;
        if (rest != 0) return;
        task.rest.erase(piece.slice);
    }
    job.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
    job.done(piece.slice);
    (slice.direction == Direction::kWrite ? counters_.write : counters_.read).add(1, slice.length);
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
        int shift = std::min(rail.faults++, 7);
        rail.retry_ns = clock() + std::min(kBackOffNs << shift, kBackOffNsMax);
        for (const auto& task : tasks_) ++task->faults;
    }
    // Not before the peer has ended its side: closed, it does so when the connections to it are.
    if (writes && !closed_) {
        rail.fenced = std::move(open);
        return;
    }
    for (const Piece& piece : open) put_back(piece);
}

void Link::put_back(const Piece& piece) {
    --piece.task->open;
    if (piece.task->job.is_waiting(piece.slice)) {
        piece.task->again.push_back({piece.slice, piece.at, piece.bytes});
        context_.counters.retries_total.fetch_add(1, std::memory_order_relaxed);
    }
}

bool Link::may_take(const Rail& rail, const Task& task) const {
    if (task.job.stopped() || closed_ || !rail.has_room()) return false;
    return !task.job.background || rail.bytes_open() <= kBackgroundBytes ||
           std::ranges::none_of(tasks_, [](const auto& other) { return !other->job.background; });
}

// Foreground first; a batch of each task in turn.
bool Link::fill(Rail& rail, uint64_t now) {
    // Not before late bytes can land over what comes now no more.
    if (rail.state != Rail::State::kUp || tasks_.empty() || !all_settled()) return false;
    bool any = false;
    for (bool background : {false, true}) {
        for (bool posted = true; posted;) {
            posted = false;
            for (const auto& task : tasks_) {
                if (task->job.background != background || !may_take(rail, *task)) continue;
                bool added = false;
                while (rail.has_room() && !hoards(rail, now) && !last_to_end(rail) && take_piece(rail, *task))
                    added = true;
                if (!added) continue;
                any = posted = true;
                if (Status status = rail.post(now); !status) {
                    stop(rail, status.error().text, true);
                    return true;
                }
            }
        }
    }
    if (tasks_.size() > 1) tasks_.splice(tasks_.end(), tasks_, tasks_.begin());
    return any;
}

// Whether one would carry memory of that node better than another, as far as both are known.
bool Link::is_better(const Rail& rail, const Rail& other, int node) {
    const int nearer = other.tier(node) - rail.tier(node);
    if (rail.bytes_per_ns() <= 0 || other.bytes_per_ns() <= 0) return nearer > 0;
    return nearer > 0 ? rail.bytes_per_ns() * kFarTimes >= other.bytes_per_ns()
                      : rail.bytes_per_ns() > other.bytes_per_ns() * kFarTimes;
}

// Else small transfers would use the rail that happened to be connected first, for ever.
void Link::note_missed(const Rail& rail, int node) {
    for (const auto& other : rails_) {
        if (other->state == Rail::State::kDown && is_better(*other, rail, node)) other->missed = true;
    }
}

// Whether a rail that is nearer to memory of that node should carry the bytes: it has room, and as far as was
// measured it would not end much later.
bool Link::is_for_nearer(const Rail& rail, const Task& task, int node, uint64_t bytes) const {
    auto end_ns = [bytes](const Rail& r) {
        return static_cast<double>(r.bytes_open() + bytes) / r.bytes_per_ns();
    };
    const uint64_t now = clock();
    return std::ranges::any_of(rails_, [&](const auto& other) REQUIRES(mutex_) {
        if (other->tier(node) >= rail.tier(node)) return false;
        if (!may_take(*other, task) || last_to_end(*other) || hoards(*other, now)) return false;
        if (other->bytes_per_ns() <= 0 || rail.bytes_per_ns() <= 0) return true;
        return end_ns(*other) <= kFarTimes * end_ns(rail);
    });
}

// Whether it has enough under way while another rail was not tried yet, which is to have some, too: else the
// first one would take all of a transfer, and of the next one.
bool Link::hoards(const Rail& rail, uint64_t now) const {
    if (rails_.size() == 1 || rail.bytes_open() < Rail::kFirstWindowBytes) return false;
    return std::ranges::any_of(rails_, [&](const auto& other) REQUIRES(mutex_) {
        if (other.get() == &rail || other->bytes_per_ns() > 0 || other->faults > 0) return false;
        return other->state == Rail::State::kUp || other->state == Rail::State::kConnecting ||
               may_connect(*other, now);
    });
}

// Whether the piece should wait for another rail, for all of them would have carried all that there is before
// this one had it: then the last pieces of a transfer do not wait for the slowest rail.
bool Link::last_to_end(const Rail& rail) const {
    if (rails_.size() == 1 || rail.bytes_per_ns() <= 0) return false;
    const double factor = uneven_ ? kFarTimes : 1;  // the other one may be the farther
    auto measured = [](const Rail& r) { return r.state == Rail::State::kUp && r.bytes_per_ns() > 0; };
    auto end_ns = [](const Rail& r, double more) {
        return (static_cast<double>(r.bytes_open()) + more) / r.bytes_per_ns();
    };
    double piece = static_cast<double>(std::min(options_.nic.piece_bytes, rail.batch_bytes()));
    auto sooner_elsewhere = [&] {
        return std::ranges::any_of(rails_, [&](const auto& other) {
            return other.get() != &rail && measured(*other) &&
                   factor * end_ns(*other, piece) < end_ns(rail, piece);
        });
    };
    if (!sooner_elsewhere()) return false;
    const double rest_max = 64 * static_cast<double>(options_.nic.piece_bytes);
    double rest = 0;  // to be posted
    for (const auto& task : tasks_) {
        for (const Task::Range& range : task->again) rest += static_cast<double>(range.bytes);
        for (size_t i = task->next; i < task->job.slices.size() && rest <= rest_max; ++i) {
            rest += static_cast<double>(task->job.slices[i].length);
        }
        if (rest > rest_max) return false;
    }
    if (rest == 0) return false;
    piece = std::min(piece, rest);
    // When all rails together end, but for those that have more under way than that takes.
    double all_ns = std::numeric_limits<double>::infinity();
    for (size_t round = 0; round < rails_.size(); ++round) {
        double bytes = rest, bytes_per_ns = 0;
        for (const auto& each : rails_) {
            if (!measured(*each) || end_ns(*each, 0) > all_ns) continue;
            bytes += static_cast<double>(each->bytes_open());
            bytes_per_ns += each->bytes_per_ns();
        }
        if (bytes_per_ns > 0) all_ns = bytes / bytes_per_ns;
    }
    return end_ns(rail, piece) > factor * all_ns && sooner_elsewhere();
}

Task::Range* Link::next_range(Task& task) const {
    while (!task.again.empty() && !task.job.is_waiting(task.again.front().slice)) task.again.pop_front();
    if (!task.again.empty()) return &task.again.front();
    const Job& job = task.job;
    while (task.next < job.slices.size() && !job.is_waiting(task.next)) ++task.next;
    if (task.next == job.slices.size()) return nullptr;
    task.again.push_back({task.next, 0, job.slices[task.next].length});
    ++task.next;
    return &task.again.front();
}

// Of what the task has to move next.
int Link::node_of(Task& task) const {
    const Task::Range* range = next_range(task);
    if (range == nullptr) return -1;
    const Slice& slice = task.job.slices[range->slice];
    const Region& local = *task.job.locals[range->slice];
    std::shared_ptr<KeyedRegion> keyed = keys_->find(local.id);
    if (keyed == nullptr || !local.contains(slice.local, slice.length)) return -1;
    return keyed->node((slice.local + range->at - local.address) / keyed->chunk_bytes);
}

const RemoteRegion* Link::find_remote(uint64_t address, uint64_t bytes) const {
    auto it = known_.upper_bound(address);
    if (it == known_.begin()) return nullptr;
    const RemoteRegion& row = std::prev(it)->second;
    return row.contains(address, bytes) ? &row : nullptr;
}

// Whether the rail has another piece of the task to carry.
bool Link::take_piece(Rail& rail, Task& task) {
    Job& job = task.job;
    while (Task::Range* range = next_range(task)) {
        const size_t i = range->slice;
        const Slice& slice = job.slices[i];
        auto leave = [&](std::string why) {
            task.left_undone = Error{Code::kUnavailable, std::move(why)};
            task.again.pop_front();
        };
        Region& local = *job.locals[i];
        if (local.on_card()) {
            leave("no NIC of this process reaches memory of a card");
            continue;
        }
        if (!local.contains(slice.local, slice.length)) {
            job.fail(i, Code::kProtocol, kOutsideText);
            continue;
        }
        // Of the whole slice: it lies in one region.
        const RemoteRegion* remote = find_remote(slice.remote, slice.length);
        if (remote == nullptr) {
            task.unknown.push_back(*range);
            task.again.pop_front();
            continue;
        }
        std::string why;
        if (!reaches(remote->kind, &why)) {
            leave(std::move(why));
            continue;
        }
        if (auto found = task.refused.find(i); found != task.refused.end() && found->second >= kRefusedMax) {
            leave("the peer's NIC refuses memory that the peer lists");
            continue;
        }
        std::shared_ptr<KeyedRegion>& keyed = task.keyed[&local];
        if (keyed == nullptr) keyed = keys_->find(local.id);
        if (local.closing()) {
            job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
            continue;
        }
        if (keyed == nullptr) {  // of a slot, which is no region
            leave("no NIC has a key for the local memory");
            continue;
        }
        const uint64_t from = slice.local + range->at - local.address;
        const uint64_t to = slice.remote + range->at - remote->address;
        Key here = keyed->key(from / keyed->chunk_bytes, rail.device), there;
        if (remote->devices > rail.peer_device) {
            there = remote->keys[to / remote->chunk_bytes * remote->devices + rail.peer_device];
        } else if (remote->devices != 0) {
            there.state = KeyState::kRefused;
        }
        if (here.state == KeyState::kRefused || there.state == KeyState::kRefused) {
            leave(here.state == KeyState::kRefused ? keyed->why_refused()
                                                   : "the peer's NIC has no key: " + remote->why_refused);
            continue;
        }
        if (here.state == KeyState::kPending || there.state == KeyState::kPending) {
            if (!job.last_path) {
                leave("the memory is getting its keys");
            } else {
                task.keyless.push_back(*range);
                task.again.pop_front();
                keyless_until_ns_ = clock() + kKeylessNs;
            }
            // Asked for again.
            if (there.state == KeyState::kPending) known_.erase(remote->address);
            continue;
        }
        const int node = keyed->node(from / keyed->chunk_bytes);
        if (uneven_ && is_for_nearer(rail, task, node, std::min(range->bytes, options_.nic.piece_bytes))) {
            return false;
        }
        if (!task.held.hold(local)) {
            job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
            continue;
        }
        uint64_t n =
            range->bytes <= kWholeBytes ? range->bytes : std::min(range->bytes, options_.nic.piece_bytes);
        n = std::min(n, rail.batch_bytes());
        n = std::min({n, keyed->chunk_bytes - from % keyed->chunk_bytes,
                      remote->chunk_bytes - to % remote->chunk_bytes});
        rail.add({&task, i, range->at, n}, slice.direction == Direction::kWrite,
                 {slice.local + range->at, here.local},
                 {slice.remote + range->at, there.remote, to % remote->chunk_bytes});
        note_missed(rail, node);
        ++task.open;
        range->at += n;
        range->bytes -= n;
        if (range->bytes == 0) task.again.pop_front();
        return true;
    }
    return false;
}

bool Link::wants_rail(const Task& task) const {
    return !task.job.stopped() && task.job.waiting != 0 &&
           (!task.again.empty() || task.next < task.job.slices.size());
}

bool Link::may_connect(const Rail& rail, uint64_t now) const {
    if (rail.state != Rail::State::kDown || !rail.port_up() || closed_) return false;
    return rail.retry_ns <= now || std::ranges::any_of(tasks_, [](const auto& task) {
               return task->job.last_path && task->faults < kFaultsMax;
           });
}

bool Link::is_late(const Task& task) {
    const Job& job = task.job;
    return now_ns() - job.progress_ns.load(std::memory_order_relaxed) >
           static_cast<uint64_t>(job.timeout_ms) * 1'000'000;
}

// A task that must end waits for no answer of the peer, nor for a rail that has been silent as long as the
// task may wait. What may still arrive is repeated over no path.
void Link::give_up_open(Task& task, uint64_t now) {
    const bool late = is_late(task);
    if (!late && !task.job.stopped() && !closed_) return;
    for (const auto& rail : rails_) {
        const uint64_t patience_ns = static_cast<uint64_t>(task.job.timeout_ms) * 1'000'000;
        if (late && rail->state == Rail::State::kUp && rail->busy() &&
            now > rail->progress_ns() + patience_ns) {
            stop(*rail, "nothing moved until the deadline of a transfer", true);
        }
        std::erase_if(rail->fenced, [&](const Piece& piece) REQUIRES(mutex_) {
            if (piece.task != &task) return false;
            --task.open;
            rail->unsettled = true;
            if (late && task.job.is_waiting(piece.slice)) {
                task.job.fail(piece.slice, Code::kTimeout,
                              rail->name() + ": " + rail->why + "; the peer did not end its side in time");
            }
            return true;
        });
    }
}

bool Link::may_end(Task& task, uint64_t now) {
    if (task.open != 0) give_up_open(task, now);
    if (task.open != 0) return false;
    Job& job = task.job;
    if (job.waiting == 0) return true;
    auto end = [&](Code code, std::string why) {
        task.status = Error{code, std::move(why)};
        return true;
    };
    if (closed_) return end(Code::kUnavailable, "the segment was closed");
    if (job.stopped()) return end(Code::kClosed, "stopped");
    if (is_late(task)) return end(Code::kTimeout, rails_.front()->why);
    if (!task.unknown.empty() || !task.keyless.empty()) return false;
    if (!wants_rail(task)) {
        task.status = task.left_undone;
        return true;
    }
    if (!all_settled()) {
        return task.faults >= kFaultsMax
                   ? end(Code::kUnavailable, "the peer has not ended a connection whose writes were given up")
                   : false;
    }
    const Rail* tried = nullptr;
    for (const auto& rail : rails_) {
        if (rail->state != Rail::State::kDown || may_connect(*rail, now)) return false;
        if (tried == nullptr || rail->faults > tried->faults) tried = rail.get();
    }
    return end(Code::kUnavailable, tried->port_up() ? tried->why : "the port " + tried->name() + " is down");
}

bool Link::needs_help(uint64_t now) const {
    bool wanted =
        std::ranges::any_of(tasks_, [&](const auto& task) REQUIRES(mutex_) { return wants_rail(*task); });
    return std::ranges::any_of(tasks_, [](const auto& task) { return !task->unknown.empty(); }) ||
           std::ranges::any_of(rails_, [&](const auto& rail) REQUIRES(mutex_) {
               return rail->state == Rail::State::kEnding || (wanted && is_to_settle(*rail)) ||
                      ((wanted || rail->missed) && may_connect(*rail, now));
           });
}

void Link::get_help() {
    if (std::exchange(helping_, true)) return;
    context_.waiters.post(false, [self = shared_from_this()] { self->help(); });
}

// One at a time; on a thread that may wait. What it waits for is never another thread of this engine.
void Link::help() {
    MutexLock lock(mutex_);
    while (end_rail() || ask_keys() || connect_rail()) {
        (void)drive();
        drive_armed();
        tell_ended();
    }
    helping_ = false;
}

// Tasks end at their deadlines meanwhile: before a rail was ever connected no other thread looks at those
// that were posted.
Result<std::vector<std::byte>> Link::ask(const std::vector<std::byte>& question) {
    struct Answer {
        Mutex mutex;
        CondVar came;
        std::optional<Result<std::vector<std::byte>>> result GUARDED_BY(mutex);
    };
    auto answer = std::make_shared<Answer>();
    control_->post(Kind::kEngineAsk, question, timeout_ms_, [answer](Result<std::vector<std::byte>> result) {
        MutexLock lock(answer->mutex);
        answer->result.emplace(std::move(result));
        answer->came.notify_all();
    });
    MutexLock lock(answer->mutex);
    while (!answer->came.wait_for(lock, kSleep,
                                  [&]() REQUIRES(answer->mutex) { return answer->result.has_value(); })) {
        lock.unlock();
        on_completions();
        lock.lock();
    }
    return std::move(*answer->result);
}

// The peer has ended its side of the rail's last connection.
void Link::settle_rail(Rail& rail) {
    rail.unsettled = false;
    changed_.notify_all();
}

bool Link::all_settled() const {
    return std::ranges::none_of(rails_, [](const auto& rail) { return rail->unsettled; });
}

bool Link::settled() const {
    MutexLock lock(mutex_);
    return all_settled();
}

// The helper asks, lest the end of a connection should meet its successor, which has the same number.
bool Link::settle(int timeout_ms) {
    MutexLock lock(mutex_);
    if (closed_) return all_settled();
    for (const auto& rail : rails_) {
        if (!rail->unsettled || rail->state != Rail::State::kDown) continue;
        rail->state = Rail::State::kEnding;
        get_help();
    }
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&]() REQUIRES(mutex_) { return all_settled(); });
}

bool Link::is_to_settle(const Rail& rail) {
    return rail.unsettled && rail.state == Rail::State::kDown && rail.end_again_ns <= now_ns();
}

bool Link::end_rail() {
    const bool wanted =
        std::ranges::any_of(tasks_, [&](const auto& task) REQUIRES(mutex_) { return wants_rail(*task); });
    auto it = std::ranges::find_if(rails_, [&](const auto& rail) {
        return rail->state == Rail::State::kEnding || (wanted && is_to_settle(*rail));
    });
    if (it == rails_.end()) return false;
    Rail& rail = **it;
    rail.state = Rail::State::kEnding;
    Status ended = success();
    if (!closed_) {
        mutex_.unlock();
        Result<std::vector<std::byte>> answer = ask(end_question(options_.transport, rail.number));
        if (!answer) ended = answer.error();
        mutex_.lock();
        if (ended) {
            settle_rail(rail);
        } else {
            rail.end_again_ns = now_ns() + kAskAgainNs;
            for (const auto& task : tasks_) ++task->faults;
        }
    }
    rail.state = Rail::State::kDown;
    std::vector<Piece> fenced = std::move(rail.fenced);
    rail.fenced.clear();
    for (const Piece& piece : fenced) {
        // What may still arrive is repeated over no path.
        if (!ended) rail.unsettled = true;
        if (!ended && !closed_ && piece.task->job.is_waiting(piece.slice)) {
            piece.task->job.fail(
                piece.slice, Code::kUnavailable,
                rail.name() + ": " + rail.why + "; the peer did not end its side: " + ended.error().text);
        }
        put_back(piece);
    }
    return true;
}

// The best one of those that may be.
Rail* Link::rail_to_connect() {
    const uint64_t now = clock();
    auto waiting =
        std::ranges::find_if(tasks_, [&](const auto& task) REQUIRES(mutex_) { return wants_rail(*task); });
    const bool wanted = waiting != tasks_.end();
    const int node = wanted ? node_of(**waiting) : -1;
    Rail* best = nullptr;
    for (const auto& rail : rails_) {
        if (!(wanted || rail->missed) || !may_connect(*rail, now)) continue;
        if (best == nullptr || is_better(*rail, *best, node)) best = rail.get();
    }
    return best;
}

bool Link::connect_rail() {
    Rail* found = rail_to_connect();
    if (found == nullptr) return false;
    Rail& rail = *found;
    rail.missed = false;
    rail.state = Rail::State::kConnecting;
    mutex_.unlock();
    Status made = rail.connect([&](std::span<const std::byte> initiator) {
        return ask(connect_question(options_.transport, rail.number, rail.peer_port, initiator));
    });
    mutex_.lock();
    if (!made) {
        rail.state = Rail::State::kDown;
        rail.why = made.error().text;
        rail.retry_ns = clock() + std::min(kBackOffNs << std::min(rail.faults++, 7), kBackOffNsMax);
        for (const auto& task : tasks_) ++task->faults;
        return true;
    }
    settle_rail(rail);  // the peer has ended the connection before
    rail.begin(clock());
    if (!std::exchange(rail.watched, true)) rail.tell(std::make_shared<Watcher>(weak_from_this()));
    return true;
}

bool Link::ask_keys() {
    std::vector<Range> ranges;
    std::set<std::pair<uint64_t, uint64_t>> asked;
    for (const auto& task : tasks_) {
        for (const Task::Range& range : task->unknown) {
            const Slice& slice = task->job.slices[range.slice];
            if (ranges.size() == kRangesMax) break;
            if (asked.emplace(slice.remote, slice.length).second)
                ranges.push_back({slice.remote, slice.length});
        }
    }
    if (ranges.empty()) return false;
    mutex_.unlock();
    Result<std::vector<std::byte>> answer = ask(keys_question(options_.transport, ranges));
    std::optional<std::vector<RemoteRegion>> rows;
    if (answer) rows = decode_keys(Reader(*answer), options_.key_size);
    mutex_.lock();
    for (size_t i = 0; rows && i < rows->size(); ++i) {
        RemoteRegion& row = (*rows)[i];
        // What it overlaps is not registered any more.
        std::erase_if(known_, [&](const auto& old) {
            return old.second.address < row.address + row.length &&
                   row.address < old.second.address + old.second.length;
        });
        known_[row.address] = std::move(row);
    }
    for (const auto& task : tasks_) {
        std::deque<Task::Range> unknown = std::move(task->unknown);
        task->unknown.clear();
        for (const Task::Range& range : unknown) {
            const Slice& slice = task->job.slices[range.slice];
            if (!asked.contains({slice.remote, slice.length})) {
                task->unknown.push_back(range);
            } else if (!rows) {
                task->left_undone =
                    answer ? Error{Code::kProtocol, "the peer sent an unreadable list of its keys"}
                           : answer.error();
            } else if (find_remote(slice.remote, slice.length) != nullptr) {
                task->again.push_back(range);
            } else if (task->job.is_waiting(range.slice)) {
                task->job.fail(
                    range.slice, Code::kInvalidArgument,
                    "the range " + range_text(slice) + " lies in no registered region of the peer");
            }
        }
    }
    return true;
}

}  // namespace moonpool::transport::nic
