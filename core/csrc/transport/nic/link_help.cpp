// What waits for the peer: ends of connections, keys, new connections; one helper at a time.
#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "base/clock.hpp"
#include "transport/nic/link.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr uint64_t kAskAgainNs = 100'000'000;  // a peer that did not end its side

}  // namespace

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

bool Link::connect_rail() {
    Rail* found = rail_to_connect();
    if (found == nullptr) return false;
    Rail& rail = *found;
    rail.missed = false;
    rail.state = Rail::State::kConnecting;
    mutex_.unlock();
    auto connect = [&] {
        return rail.connect([&](std::span<const std::byte> initiator) {
            return ask(connect_question(options_.transport, rail.number, rail.peer_port, initiator));
        });
    };
    Status made = connect();
    if (!made && made.error().code == Code::kTooLarge && options_.links->end_idle(rail.device))
        made = connect();
    mutex_.lock();
    if (!made) {
        rail.state = Rail::State::kDown;
        rail.why = made.error().text;
        rail.retry_ns = clock() + back_off_ns(rail.faults++);
        ++rail.faults_total;
        for (const auto& task : tasks_) ++task->faults;
        return true;
    }
    settle_rail(rail);  // the peer has ended the connection before
    rail.begin(clock());
    if (!std::exchange(rail.watched, true)) rail.tell(make_watcher());
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
        std::vector<Task::Range> unknown = std::exchange(task->unknown, {});
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
