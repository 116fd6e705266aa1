#include "transport/staged_run.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "transport/card_batch.hpp"

namespace moonpool::transport {

namespace {

constexpr size_t kPartsMax = 4096;  // of one chunk

// A job of its own over some parts of the slices of a whole one.
class PartialJob {
   public:
    PartialJob(const Job& whole, std::shared_ptr<const Regions> regions) {
        job_.background = whole.background;
        job_.last_path = whole.last_path;
        job_.timeout_ms = whole.timeout_ms;
        job_.closing = whole.closing;
        job_.whole = &whole;
        job_.regions = std::move(regions);
    }
    void add(const Slice& slice, Region* local) {
        slices_.push_back(slice);
        locals_.push_back(local);
    }
    Status run(Link& link) {
        states_ = std::vector<std::atomic<SliceState>>(slices_.size());
        for (auto& state : states_) state.store(SliceState::kWaiting, std::memory_order_relaxed);
        job_.slices = slices_;
        job_.states = states_;
        job_.locals = locals_;
        job_.waiting = slices_.size();
        job_.progress_ns = now_ns();
        return link.run(job_);
    }
    SliceState state(size_t i) const { return states_[i].load(std::memory_order_relaxed); }
    const Error& refusal() const { return job_.refusal; }

   private:
    std::vector<Slice> slices_;
    std::vector<Region*> locals_;
    std::vector<std::atomic<SliceState>> states_;
    Job job_;
};

struct Part {
    size_t slice = 0;
    uint64_t at = 0, bytes = 0;
};

// Parts of one direction, of slices on one card, which fit into one slot.
struct Chunk {
    std::shared_ptr<device::CardCopier> copier;
    Direction direction = Direction::kRead;
    std::vector<Part> parts;
    std::vector<bool> arrived;  // of a read's parts: they lie in the slot
    std::optional<device::CardCopier::Running> copies;
};

// What copies of a chunk use.
struct ChunkMemory {
    explicit ChunkMemory(std::shared_ptr<const Regions> regions) : locals(std::move(regions)) {}
    Operation locals;
    device::RingSlot slot;
};

class StagedRun {
   public:
    StagedRun(Link& link, Job& job) : link_(link), job_(job), moved_(job.slices.size(), 0) {}

    Status run() {
        Status status = run_on_host();
        std::optional<Staged> before;
        while (status && job_.waiting != 0) {
            std::optional<Staged> next = cut();
            if (!next && !before) break;
            // A run that waits for a slot has none: else several would wait for one another's.
            bool at_once = next && take_slot_now(*next);
            if (next && at_once) status = begin(*next);
            if (before) {
                Status ended = end(*before);
                if (status) status = std::move(ended);
                before.reset();
            }
            if (next && !at_once && status) status = wait_and_begin(*next);
            before = std::move(next);
        }
        if (before) {  // after an error, too: it is under way
            Status ended = end(*before);
            if (status) status = std::move(ended);
        }
        // What moved of slices that are not whole moves again by the next link.
        for (size_t i = 0; i < moved_.size(); ++i) {
            if (job_.is_waiting(i)) job_.bytes_done.fetch_sub(moved_[i], std::memory_order_relaxed);
        }
        return status;
    }

   private:
    struct Staged : Chunk {
        std::shared_ptr<ChunkMemory> memory;
    };

    // Slices of such a job whose local memory is the host's.
    Status run_on_host() {
        PartialJob part(job_, job_.regions);
        std::vector<size_t> which;
        for (size_t i = 0; i < job_.slices.size(); ++i) {
            if (!job_.is_waiting(i) || job_.locals[i]->on_card()) continue;
            part.add(job_.slices[i], job_.locals[i]);
            which.push_back(i);
        }
        if (which.empty()) return success();
        Status status = part.run(link_);
        for (size_t k = 0; k < which.size(); ++k) take(part, k, {which[k], 0, job_.slices[which[k]].length});
        return status;
    }

    // The next parts that were not asked for; nothing: there are none. First all writes, then all reads: a
    // job has no order, and a chunk has one direction.
    std::optional<Staged> cut() {
        Staged chunk;
        chunk.direction = direction_;
        uint64_t bytes = 0;
        for (; next_ < job_.slices.size() && chunk.parts.size() < kPartsMax; ++next_, at_ = 0) {
            const Slice& slice = job_.slices[next_];
            if (!job_.is_waiting(next_) || slice.direction != direction_) continue;
            if (!job_.locals[next_]->on_card()) continue;
            const auto& copier = job_.locals[next_]->card;
            if (chunk.copier == nullptr) chunk.copier = copier;
            if (chunk.copier != copier) break;
            uint64_t n = std::min(slice.length - at_, copier->slot_bytes() - bytes);
            if (n == 0) break;
            chunk.parts.push_back({next_, at_, n});
            bytes += n;
            at_ += n;
            if (at_ != slice.length) break;  // the slot is full
        }
        if (!chunk.parts.empty()) return chunk;
        if (direction_ == Direction::kRead) return std::nullopt;
        direction_ = Direction::kRead;
        next_ = at_ = 0;
        return cut();
    }

    bool take_slot_now(Staged& chunk) {
        Result<device::RingSlot> slot = chunk.copier->take(0, true);
        if (!slot) return false;
        use(chunk, std::move(*slot));
        return true;
    }
    void use(Staged& chunk, device::RingSlot slot) {
        chunk.memory = std::make_shared<ChunkMemory>(job_.regions);
        chunk.memory->slot = std::move(slot);
    }
    Status wait_and_begin(Staged& chunk) {
        Result<device::RingSlot> slot = wait_for_slot(*chunk.copier, job_);
        if (!slot) return slot.error();
        use(chunk, std::move(*slot));
        return begin(chunk);
    }

    Status begin(Staged& chunk) {
        chunk.arrived.assign(chunk.parts.size(), true);
        if (chunk.direction == Direction::kRead) {
            if (Status status = carry(chunk); !status) return status;
        }
        std::vector<device::Copy> copies;
        uint64_t place = chunk.memory->slot.address();
        for (size_t k = 0; k < chunk.parts.size(); place += chunk.parts[k].bytes, ++k) {
            const Part& part = chunk.parts[k];
            const Slice& slice = job_.slices[part.slice];
            Region& local = *job_.locals[part.slice];
            if (!chunk.arrived[k] || !job_.is_waiting(part.slice)) continue;
            if (!local.contains(slice.local, slice.length)) {
                fail(part.slice, Error{Code::kProtocol, kOutsideText});
            } else if (!chunk.memory->locals.hold(local)) {
                fail(part.slice, Error{Code::kInvalidArgument, "the local region was deregistered"});
            } else if (chunk.direction == Direction::kRead) {
                copies.push_back({slice.local + part.at, place, part.bytes});
            } else {
                copies.push_back({place, slice.local + part.at, part.bytes});
            }
        }
        if (copies.empty()) return success();
        Result<device::CardCopier::Running> running = chunk.copier->start(copies, chunk.memory);
        if (!running) return running.error();
        chunk.copies.emplace(std::move(*running));
        return success();
    }

    Status end(Staged& chunk) {
        if (!chunk.copies) return success();  // it did not begin, or all of it has failed
        if (Status ended = wait_for_copies(*chunk.copies, job_); !ended) {
            // No other path may move them, which could end before these copies do.
            for (const Part& part : chunk.parts) fail(part.slice, ended.error());
            return ended;
        }
        if (chunk.direction == Direction::kWrite) return carry(chunk);
        for (size_t k = 0; k < chunk.parts.size(); ++k) {
            if (chunk.arrived[k]) arrive(chunk.parts[k]);
        }
        return success();
    }

    // The link's half of a chunk: between the slot and the peer.
    Status carry(Staged& chunk) {
        Region slot;
        slot.address = chunk.memory->slot.address();
        slot.length = chunk.memory->slot.bytes().size();
        PartialJob job(job_, nullptr);
        std::vector<size_t> which;
        uint64_t place = slot.address;
        for (size_t k = 0; k < chunk.parts.size(); place += chunk.parts[k].bytes, ++k) {
            const Part& part = chunk.parts[k];
            if (!job_.is_waiting(part.slice)) continue;
            job.add({place, job_.slices[part.slice].remote + part.at, part.bytes, chunk.direction}, &slot);
            which.push_back(k);
        }
        chunk.arrived.assign(chunk.parts.size(), false);
        if (which.empty()) return success();
        Status status = job.run(link_);
        for (size_t n = 0; n < which.size(); ++n) {
            const Part& part = chunk.parts[which[n]];
            if (chunk.direction == Direction::kWrite || job.state(n) != SliceState::kDone) {
                take(job, n, part);
            } else {
                chunk.arrived[which[n]] = true;
            }
        }
        return status;
    }

    // What became of a part is what becomes of its slice.
    void take(const PartialJob& job, size_t n, const Part& part) {
        if (job.state(n) == SliceState::kDone) return arrive(part);
        if (job.state(n) != SliceState::kFailed || !job_.is_waiting(part.slice)) return;
        fail(part.slice, job.refusal());
    }
    void fail(size_t slice, const Error& why) {
        if (!job_.is_waiting(slice)) return;
        job_.bytes_done.fetch_sub(moved_[slice], std::memory_order_relaxed);
        moved_[slice] = 0;
        job_.fail(slice, why.code, why.text);
    }
    void arrive(const Part& part) {
        job_.progress_ns.store(now_ns(), std::memory_order_relaxed);
        if (!job_.is_waiting(part.slice)) return;
        job_.bytes_done.fetch_add(part.bytes, std::memory_order_relaxed);
        moved_[part.slice] += part.bytes;
        if (moved_[part.slice] == job_.slices[part.slice].length) job_.done(part.slice);
    }

    Link& link_;
    Job& job_;
    std::vector<uint64_t> moved_;  // of each slice, as job_.bytes_done counts it
    Direction direction_ = Direction::kWrite;
    size_t next_ = 0;  // the slice that is cut next
    uint64_t at_ = 0;
};

}  // namespace

Status run_staged(Link& link, Job& job) { return StagedRun(link, job).run(); }

}  // namespace moonpool::transport
