#include "transport/outside/link.hpp"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"

namespace moonpool::transport::outside {

namespace {

constexpr size_t kRefusalBytesMax = MOONPOOL_WHY_BYTES;
constexpr int kSettleMs = 500;  // within a run

// A job while the library has it. All of the job's state that verdicts change is changed under the lock.
class RunningBatch {
   public:
    RunningBatch(Job& job, TransportCounters& moved) : job_(&job), tally_(moved) {}

    std::vector<moonpool_slice> slices;
    std::vector<size_t> places;  // of each in the job

    struct End {
        size_t unjudged = 0;   // slices
        std::string deferred;  // why slices were refused that another path shall judge; empty: none
        std::string lie;       // empty: none
    };

    int32_t take(uint64_t first, uint64_t count, int32_t verdict, const char* why) {
        MutexLock lock(mutex_);
        if (job_ == nullptr) return -1;
        if (verdict != MOONPOOL_DONE && verdict != MOONPOOL_REFUSED) {
            return lied("it gave the verdict " + std::to_string(verdict) + ", which there is not");
        }
        if (first > slices.size() || count > slices.size() - first) {
            return lied("it gave a verdict of slices " + std::to_string(first) + " + " +
                        std::to_string(count) + " of a batch of " + std::to_string(slices.size()));
        }
        judged_.resize(slices.size());
        for (uint64_t k = first; k < first + count; ++k) {
            if (judged_[k]) return lied("it gave a second verdict of slice " + std::to_string(k));
        }
        std::string text;
        if (verdict == MOONPOOL_REFUSED && why != nullptr) text = text_of_library(why, kRefusalBytesMax);
        if (text.empty()) text = "the peer refused it without a reason";
        for (uint64_t k = first; k < first + count; ++k) {
            size_t i = places[k];
            judged_[k] = true;
            ++judged_count_;
            if (verdict == MOONPOOL_REFUSED) {
                // The peer's library does not know all of the peer's memory: cards' not, for one. What other
                // paths are there know it, and theirs is the verdict.
                if (job_->last_path) {
                    job_->fail(i, Code::kInvalidArgument, text);
                } else {
                    deferred_ = text;
                }
                continue;
            }
            job_->done(i);
            job_->bytes_done.fetch_add(slices[k].bytes, std::memory_order_relaxed);
            tally_.count(slices[k].direction == MOONPOOL_WRITE, slices[k].bytes);
        }
        job_->progress_ns.store(now_ns(), std::memory_order_relaxed);
        return 0;
    }

    int32_t is_over() {
        MutexLock lock(mutex_);
        if (job_ == nullptr || job_->stopped() || !lie_.empty()) return MOONPOOL_STOPPED;
        uint64_t limit_ns = static_cast<uint64_t>(job_->timeout_ms) * 1000000;
        bool overdue = now_ns() - job_->progress_ns.load(std::memory_order_relaxed) > limit_ns;
        return overdue ? MOONPOOL_OVERDUE : MOONPOOL_GO_ON;
    }

    void progress() {
        MutexLock lock(mutex_);
        if (job_ != nullptr) job_->progress_ns.store(now_ns(), std::memory_order_relaxed);
    }

    // Verdicts are taken no more.
    End end() {
        MutexLock lock(mutex_);
        job_ = nullptr;
        return {slices.size() - judged_count_, std::move(deferred_), std::move(lie_)};
    }

   private:
    int32_t lied(std::string what) REQUIRES(mutex_) {
        if (lie_.empty()) lie_ = std::move(what);
        return -1;
    }

    Mutex mutex_;
    Job* job_ GUARDED_BY(mutex_);
    Tally tally_ GUARDED_BY(mutex_);
    std::vector<bool> judged_ GUARDED_BY(mutex_);
    size_t judged_count_ GUARDED_BY(mutex_) = 0;
    std::string deferred_ GUARDED_BY(mutex_), lie_ GUARDED_BY(mutex_);
};

// Of this process, of all engines: a library may mix them up, too.
struct RunningBatches {
    Mutex mutex;
    uint64_t next GUARDED_BY(mutex) = 1;
    std::unordered_map<uint64_t, std::shared_ptr<RunningBatch>> by_id GUARDED_BY(mutex);

    uint64_t add(std::shared_ptr<RunningBatch> batch) {
        MutexLock lock(mutex);
        by_id[next] = std::move(batch);
        return next++;
    }
    void remove(uint64_t id) {
        MutexLock lock(mutex);
        by_id.erase(id);
    }
    std::shared_ptr<RunningBatch> find(uint64_t id) {
        MutexLock lock(mutex);
        auto it = by_id.find(id);
        return it == by_id.end() ? nullptr : it->second;
    }
};

RunningBatches& running_batches() {
    static auto* kept = new RunningBatches;  // threads of libraries may outlast us
    return *kept;
}

int32_t batch_is_over(uint64_t id) {
    std::shared_ptr<RunningBatch> batch = running_batches().find(id);
    return batch == nullptr ? MOONPOOL_STOPPED : batch->is_over();
}

void batch_progress(uint64_t id) {
    if (std::shared_ptr<RunningBatch> batch = running_batches().find(id)) batch->progress();
}

int32_t batch_verdict(uint64_t id, uint64_t first, uint64_t count, int32_t verdict, const char* why) {
    std::shared_ptr<RunningBatch> batch = running_batches().find(id);
    return batch == nullptr ? -1 : batch->take(first, count, verdict, why);
}

int32_t engine_shuts_out(const moonpool_engine* engine, const uint8_t segment[16]) {
    SegmentId id;
    std::copy(segment, segment + id.size(), id.begin());
    return reinterpret_cast<const Instance*>(engine)->shut_out->has(id) ? 1 : 0;
}

constexpr moonpool_host kHost = {sizeof(moonpool_host), MOONPOOL_TRANSPORT_VERSION,
                                 batch_is_over,         batch_progress,
                                 batch_verdict,         engine_shuts_out};

Code code_of(int32_t returned) {
    switch (returned) {
        case MOONPOOL_TIMEOUT:
            return Code::kTimeout;
        case MOONPOOL_PROTOCOL:
            return Code::kProtocol;
        default:
            return Code::kUnavailable;
    }
}

}  // namespace

const moonpool_host& host() { return kHost; }

std::string Link::path() const {
    const std::string& name = instance_->library->name;
    if (table().path == nullptr) return name;
    char text[256] = {};
    table().path(handle_, text, sizeof(text));
    std::string said = text_of_library(text, sizeof(text));
    return said.empty() ? name : name + " " + said;
}

// The link is not used any more: what else the library says of it is worth as little.
Error Link::end(const std::string& what) {
    MutexLock lock(mutex_);
    if (lie_.empty()) {
        lie_ = instance_->library->said() + " broke its contract: " + what;
        counters_.protocol_errors_total.fetch_add(1, std::memory_order_relaxed);
        broken_ = true;
    }
    return Error{Code::kProtocol, lie_};
}

Status Link::run(Job& job) {
    if (broken_) return end("");
    // Bytes of earlier writes must not land over those of this job.
    if (!settle(std::min(job.timeout_ms, kSettleMs))) {
        return Error{Code::kUnavailable, "the peer has not confirmed the end of earlier writes"};
    }
    auto running = std::make_shared<RunningBatch>(job, moved_);
    Operation held(job.regions);
    for (size_t i = 0; i < job.slices.size(); ++i) {
        if (!job.is_waiting(i)) continue;
        const Slice& slice = job.slices[i];
        Region& local = *job.locals[i];
        if (!local.contains(slice.local, slice.length)) {
            job.fail(i, Code::kProtocol, kOutsideText);
        } else if (!held.hold(local)) {
            job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
        } else {
            uint32_t direction = slice.direction == Direction::kWrite ? MOONPOOL_WRITE : MOONPOOL_READ;
            running->slices.push_back(
                {reinterpret_cast<void*>(slice.local), slice.remote, slice.length, direction, 0});
            running->places.push_back(i);
        }
    }
    if (running->slices.empty()) return success();
    moonpool_batch batch{};
    batch.struct_bytes = sizeof(batch);
    batch.background = job.background ? 1 : 0;
    batch.id = running_batches().add(running);
    batch.count = running->slices.size();
    batch.slices = running->slices.data();
    batch.timeout_ms = job.timeout_ms;
    Why why;
    int32_t returned = table().run(handle_, &batch, why.buffer());
    running_batches().remove(batch.id);
    RunningBatch::End ended = running->end();
    held.end();
    if (!ended.lie.empty()) {
        Error lie = end(ended.lie);
        keep_writes(job, lie.text);
        return lie;
    }
    if (job.waiting == 0) return success();
    if (ended.unjudged == 0) return Error{Code::kUnavailable, ended.deferred};
    std::string text = why.text();
    if (returned == MOONPOOL_OK) {
        text = end("it returned success from a batch of " + std::to_string(batch.count) + ", and left " +
                   std::to_string(ended.unjudged) + " slices without a verdict")
                   .text;
    }
    keep_writes(job, text);
    if (job.stopped()) return Error{Code::kClosed, "stopped"};
    return Error{returned == MOONPOOL_OK ? Code::kProtocol : code_of(returned), text};
}

// No other path may repeat a write whose bytes may still come by this one, and lie over newer ones then.
void Link::keep_writes(Job& job, const std::string& why) {
    auto waits = [&](size_t i) { return job.is_waiting(i) && job.slices[i].direction == Direction::kWrite; };
    size_t first = 0;
    while (first < job.slices.size() && !waits(first)) ++first;
    if (first == job.slices.size() || settle(std::min(job.timeout_ms, kSettleMs))) return;
    for (size_t i = first; i < job.slices.size(); ++i) {
        if (waits(i)) job.fail(i, Code::kUnavailable, why + "; bytes of it may still arrive");
    }
}

}  // namespace moonpool::transport::outside
