#include "device/card_copier.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/fork_fresh.hpp"

namespace moonpool::device {

namespace {

constexpr auto kFirstPause = std::chrono::microseconds(5);
constexpr auto kLongestPause = std::chrono::microseconds(100);

// Those with copies that were given up.
struct Abandoning {
    Mutex mutex;
    std::vector<std::weak_ptr<CardCopier>> copiers GUARDED_BY(mutex);
};
ForkFresh<Abandoning> abandoning;

}  // namespace

void CardCopier::collect_all() {
    std::vector<std::shared_ptr<CardCopier>> copiers;
    {
        Abandoning& all = abandoning.get();
        MutexLock lock(all.mutex);
        std::erase_if(all.copiers, [](const auto& copier) { return copier.expired(); });
        for (const auto& copier : all.copiers) copiers.push_back(copier.lock());
    }
    for (const auto& copier : copiers) {
        if (copier != nullptr) (void)copier->collect();
    }
}

Status CardCopier::wait_for_abandoned(Stream& stream) {
    MutexLock lock(mutex_);
    for (const auto& lane : abandoned_) {
        if (!lane->recorded) continue;
        if (Status waits = stream.wait_for(lane->ended); !waits) return waits;
    }
    return success();
}

Result<std::shared_ptr<CardCopier>> CardCopier::open(int ordinal, const RingOptions& ring) {
    Result<std::shared_ptr<Device>> device = Device::open(ordinal);
    if (!device) return device.error();
    Result<std::unique_ptr<PinnedRing>> pinned = PinnedRing::open(*device, ring);
    if (!pinned) return pinned.error();
    return std::shared_ptr<CardCopier>(new CardCopier(std::move(*device), std::move(*pinned)));
}

CardCopier::~CardCopier() {
    if (device_->in_child()) {  // where the mutex may be held for ever
        (void)ring_.release();
        return;
    }
    // What an abandoned lane keeps refers to this object through its regions: there is none here any more.
}

Result<std::unique_ptr<CardCopier::Lane>> CardCopier::take_lane() {
    {
        MutexLock lock(mutex_);
        if (!idle_.empty()) {
            std::unique_ptr<Lane> lane = std::move(idle_.back());
            idle_.pop_back();
            return lane;
        }
    }
    Result<Stream> stream = Stream::create(device_, Stream::Priority::kLowest);
    if (!stream) return stream.error();
    Result<Event> ended = Event::create(device_);
    if (!ended) return ended.error();
    return std::unique_ptr<Lane>(new Lane{std::move(*stream), std::move(*ended), false, nullptr, {}});
}

Result<CardCopier::Running> CardCopier::start(std::span<const Copy> copies, std::shared_ptr<void> kept) {
    collect();
    Result<std::unique_ptr<Lane>> lane = take_lane();
    if (!lane) return lane.error();
    (*lane)->kept = std::move(kept);
    Status queued = wait_for_abandoned((*lane)->stream);
    if (queued) queued = pieces_->queue((*lane)->stream, copies, (*lane)->buffer);
    (*lane)->recorded = (*lane)->ended.record((*lane)->stream.handle()).ok();
    Running running(shared_from_this(), std::move(*lane));
    if (!queued) return queued.error();  // those that were queued run on, without a caller
    return running;
}

// An event that could not be recorded is recorded later: then it is over a little later, too.
Result<bool> CardCopier::ask(Lane& lane) const {
    if (!lane.recorded) lane.recorded = lane.ended.record(lane.stream.handle()).ok();
    if (lane.recorded) {
        Result<bool> over = lane.ended.over();
        if (over) return over;
    }
    if (int code = device_->lost(); code != 0) {
        return Error{Code::kUnavailable, "the CUDA device is lost: " + device_->driver().describe(code)};
    }
    return false;
}

CardCopier::Running& CardCopier::Running::operator=(Running&& other) noexcept {
    if (this != &other) {
        give_up();
        copier_ = std::move(other.copier_);
        lane_ = std::move(other.lane_);
    }
    return *this;
}

Result<bool> CardCopier::Running::wait(int timeout_ms) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::max(timeout_ms, 0));
    for (auto pause = kFirstPause; lane_ != nullptr; pause = std::min(2 * pause, kLongestPause)) {
        Result<bool> over = copier_->ask(*lane_);
        if (!over) {
            lane_.reset();
            return over.error();
        }
        if (*over) {
            lane_->end();
            MutexLock lock(copier_->mutex_);
            copier_->idle_.push_back(std::move(lane_));
            break;
        }
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(pause);
    }
    return true;
}

void CardCopier::Running::give_up() {
    if (lane_ != nullptr) copier_->abandon(std::move(lane_));
    copier_.reset();
}

void CardCopier::abandon(std::unique_ptr<Lane> lane) {
    if (device_->in_child()) {
        (void)lane.release();
        return;
    }
    {
        MutexLock lock(mutex_);
        abandoned_.push_back(std::move(lane));
    }
    {
        Abandoning& all = abandoning.get();
        MutexLock lock(all.mutex);
        auto same = [this](const auto& known) { return known.lock().get() == this; };
        if (std::ranges::none_of(all.copiers, same)) all.copiers.push_back(weak_from_this());
    }
    (void)collect();
}

bool CardCopier::collect() {
    if (device_->in_child()) return false;
    std::vector<std::unique_ptr<Lane>> ended;  // ends outside of the lock: what it kept may end this object
    MutexLock lock(mutex_);
    for (size_t i = 0; i < abandoned_.size();) {
        Result<bool> over = ask(*abandoned_[i]);
        if (over && !*over) {
            ++i;
            continue;
        }
        ended.push_back(std::move(abandoned_[i]));
        abandoned_.erase(abandoned_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return !abandoned_.empty();
}

}  // namespace moonpool::device
