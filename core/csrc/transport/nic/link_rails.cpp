// Which rail carries the next piece, and which is connected next.
#include <algorithm>
#include <limits>

#include "transport/nic/link.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr uint64_t kBackgroundBytes = 512u << 10;  // open on one rail beside foreground tasks
// A rail that is far from the memory takes a piece when the near ones would need so many times as long.
constexpr double kFarTimes = 2;

}  // namespace

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
                if (task->job.background != background || !wants_rail(*task) || !may_take(rail, *task))
                    continue;
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
    const int nearer = other.near.tier(node) - rail.near.tier(node);
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
        if (other->near.tier(node) >= rail.near.tier(node)) return false;
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
        rest += static_cast<double>(task->again.bytes());
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

bool Link::may_connect(const Rail& rail, uint64_t now) const {
    if (rail.state != Rail::State::kDown || !rail.port_up() || closed_) return false;
    return rail.retry_ns <= now || std::ranges::any_of(tasks_, [](const auto& task) {
               return task->job.last_path && task->faults < kFaultsMax;
           });
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

}  // namespace moonpool::transport::nic
