// The log is a ring: when room runs short, the segment that was written longest ago is emptied.
//
//   closed --start--> reclaiming --copies written--> draining --copies synced--> drained
//   drained --the tail is on the disk, no reader--> free
//
// While the live objects fill at most half of the log, all of them are copied; above that only those that
// were used since they were written, and of a segment at most half. So a segment costs at most one segment of
// copies, and what no caller asked for goes in the order it came.
#include <algorithm>

#include "ssd/engine.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kCopiesInFlight = 8;
constexpr uint64_t kCopyBytesInFlight = 16u << 20;

}  // namespace

uint64_t Engine::tail() const {
    uint64_t lowest = next_number_;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
        SlotState state = states_[slot];
        bool over = state == SlotState::kFree || state == SlotState::kDrained || state == SlotState::kBad;
        if (!over) lowest = std::min(lowest, numbers_[slot]);
    }
    return lowest;
}

bool Engine::draining() const {
    return std::any_of(states_.begin(), states_.end(), [](SlotState state) {
        return state == SlotState::kDraining || state == SlotState::kDrained;
    });
}

void Engine::step_reclaim() {
    if (!reclaim_.active) {
        uint32_t wanted = std::clamp<uint32_t>(slots_ / 16, kSegmentsForReclaim + 1, 8);
        bool waiting = draining();
        if (waiting) free_drained(tail_written_);  // its last reader may have left
        if (waiting || (free_.size() >= wanted && !reclaim_wanted_)) return;
        std::lock_guard lock(mutex_);
        if (closing_ || read_only_ || off_) return;
    }
    if (!reclaim_.active) start_reclaim();
    while (reclaim_.active && !reclaim_.copies.empty() && reclaim_.in_flight < kCopiesInFlight &&
           reclaim_.bytes_in_flight < kCopyBytesInFlight) {
        copy_next();
    }
    if (reclaim_.active && reclaim_.copies.empty() && reclaim_.in_flight == 0) drain();
}

uint32_t Engine::oldest_closed() const {
    uint32_t oldest = slots_;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
        if (states_[slot] != SlotState::kClosed) continue;
        if (oldest == slots_ || numbers_[slot] < numbers_[oldest]) oldest = slot;
    }
    return oldest;
}

void Engine::start_reclaim() {
    uint32_t oldest = oldest_closed();
    if (oldest == slots_) return;
    reclaim_wanted_ = false;
    states_[oldest] = SlotState::kReclaiming;
    reclaim_ = Reclaim{};
    reclaim_.active = true;
    reclaim_.slot = oldest;
    std::lock_guard lock(mutex_);
    uint64_t capacity = slots_ * superblock_.segment_bytes;
    bool roomy = index_.live_bytes() <= capacity / 2 && index_.count() <= options_.records_max / 2;
    uint64_t budget = superblock_.segment_bytes / (roomy ? 1 : 2);
    for (uint32_t at = index_.oldest(oldest); at != kNoEntry; at = index_.entry(at).newer) {
        Entry& e = index_.entry(at);
        bool worth_it = (roomy || e.used) && e.record_bytes <= budget;
        e.used = false;
        if (!worth_it) continue;
        budget -= e.record_bytes;
        reclaim_.copies.emplace_back(e.hash, e.sequence);
    }
}

void Engine::copy_next() {
    auto [hash, sequence] = reclaim_.copies.front();
    reclaim_.copies.pop_front();
    auto read = std::make_shared<ReadJob>();
    auto write = std::make_shared<WriteJob>();
    {
        std::lock_guard lock(mutex_);
        uint32_t at = index_.find(hash);
        if (at == kNoEntry || index_.entry(at).sequence != sequence) return;
        const Entry& e = index_.entry(at);
        write->kind = WriteJob::Kind::kCopy;
        write->sequence = sequence;
        write->space = e.space;
        write->identity = spaces_[e.space].identity;
        write->hash = hash;
        write->name = e.name();
        write->parent = e.parent();
        write->size = e.size;
        write->crc = e.crc;
        write->from = e.place;
        write->own.resize(e.size);
        read->sequence = sequence;
        read->hash = hash;
        read->place = e.place;
        read->offset = begin_of(e.place.slot) + uint64_t{e.place.block} * kBlockBytes + e.data_offset;
        read->crc = e.crc;
        ++readers_[e.place.slot];
        ++reads_waiting_;
    }
    read->to = write->own;
    write->parts.push_back(write->own);
    uint64_t bytes = write->size;
    ++reclaim_.in_flight;
    reclaim_.bytes_in_flight += bytes;
    write->done = [this, bytes](Outcome) { end_copy(bytes); };
    read->done = [this, write, bytes](Outcome outcome) {
        if (outcome != Outcome::kDone) return end_copy(bytes);
        internal_writes_.push_back(write);
    };
    reads_.push_back(read);
    start_reads();
}

void Engine::end_copy(uint64_t bytes) {
    --reclaim_.in_flight;
    reclaim_.bytes_in_flight -= bytes;
}

// What was not copied is forgotten; then the copies are made safe before the segment may be used again.
void Engine::drain() {
    uint32_t slot = reclaim_.slot;
    reclaim_.active = false;
    {
        std::lock_guard lock(mutex_);
        if (closing_ || read_only_) {
            states_[slot] = SlotState::kClosed;
            return;
        }
        forget_segment(slot);
    }
    // Until the copies are safe no tail may pass it.
    states_[slot] = SlotState::kDraining;
    after_writes([this, slot] {
        sync_file([this, slot](int error) {
            if (error != 0) return;
            states_[slot] = SlotState::kDrained;
            tail_to_write_ = tail();
        });
    });
}

void Engine::forget_segment(uint32_t slot) {
    for (uint32_t at; (at = index_.oldest(slot)) != kNoEntry;) {
        ++counters_.evicted;
        counters_.evicted_bytes += index_.entry(at).size;
        gone_.push_back(index_.entry(at).hash);
        index_.erase(at);
    }
    ++counters_.reclaimed;
}

// There is no room even for what makes room. The header of the next segment will tell the new tail.
bool Engine::free_one_at_once() {
    free_drained(tail_to_write_);
    if (!free_.empty()) return true;
    if (reclaim_.active) {  // it waits for room that only its own end can make
        reclaim_.copies.clear();
        for (auto it = internal_writes_.begin(); it != internal_writes_.end();) {
            WriteJobPtr job = *it;
            if (job->kind != WriteJob::Kind::kCopy) {
                ++it;
                continue;
            }
            it = internal_writes_.erase(it);
            job->failed = true;
            finish_write(job);
        }
        return false;
    }
    return !draining() && forget_oldest() && !free_.empty();
}

bool Engine::forget_oldest() {
    uint32_t slot = oldest_closed();
    if (slot == slots_) return false;
    {
        std::lock_guard lock(mutex_);
        forget_segment(slot);
    }
    states_[slot] = SlotState::kDrained;
    tail_to_write_ = tail();
    free_drained(tail_to_write_);
    return true;
}

void Engine::free_drained(uint64_t lowest) {
    std::lock_guard lock(mutex_);
    for (uint32_t slot = 0; slot < slots_; ++slot) {
        if (states_[slot] != SlotState::kDrained || numbers_[slot] >= lowest || readers_[slot] != 0) continue;
        states_[slot] = SlotState::kFree;
        numbers_[slot] = 0;
        free_.push_back(slot);
    }
    free_count_ = free_.size();
}

}  // namespace moonpool::ssd
