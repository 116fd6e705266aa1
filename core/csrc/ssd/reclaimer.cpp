#include "ssd/reclaimer.hpp"

#include <algorithm>

namespace moonpool::ssd {

namespace {

constexpr uint32_t kCopiesInFlight = 8;
constexpr uint64_t kCopyBytesInFlight = 16u << 20;

}  // namespace

void Reclaimer::step() {
    if (slot_ == SegmentTable::kNoSegment) {
        uint32_t wanted = std::clamp<uint32_t>(log_.slots / 16, kSegmentsForReclaim + 1, 8);
        bool waiting = segments_.draining();
        if (waiting) segments_.free_drained(segments_.tail_written());  // its last reader may have left
        if (waiting || (segments_.free() >= wanted && !log_.reclaim_wanted)) return;
        MutexLock lock(log_.mutex);
        if (log_.closing || log_.read_only || log_.off) return;
    }
    if (slot_ == SegmentTable::kNoSegment) start();
    while (slot_ != SegmentTable::kNoSegment && !copies_.empty() && in_flight_ < kCopiesInFlight &&
           bytes_in_flight_ < kCopyBytesInFlight) {
        copy_next();
    }
    if (slot_ != SegmentTable::kNoSegment && copies_.empty() && in_flight_ == 0) drain();
}

void Reclaimer::start() {
    uint32_t oldest = segments_.oldest_closed();
    if (oldest == SegmentTable::kNoSegment) return;
    log_.reclaim_wanted = false;
    segments_.move(oldest, SegmentState::kReclaiming);
    slot_ = oldest;
    copies_.clear();
    MutexLock lock(log_.mutex);
    uint64_t capacity = log_.slots * log_.superblock.segment_bytes;
    bool roomy =
        log_.index.live_bytes() <= capacity / 2 && log_.index.count() <= log_.options.records_max / 2;
    uint64_t budget = log_.superblock.segment_bytes / (roomy ? 1 : 2);
    for (uint32_t at = log_.index.oldest(oldest); at != kNoEntry; at = log_.index.entry(at).newer) {
        Entry& e = log_.index.entry(at);
        bool worth_it = (roomy || e.used) && e.record_bytes <= budget;
        e.used = false;
        if (!worth_it) continue;
        budget -= e.record_bytes;
        copies_.emplace_back(e.hash, e.sequence);
    }
}

void Reclaimer::copy_next() {
    auto [hash, sequence] = copies_.front();
    copies_.pop_front();
    auto read = std::make_shared<ReadJob>();
    auto write = std::make_shared<WriteJob>();
    {
        MutexLock lock(log_.mutex);
        uint32_t at = log_.index.find(hash);
        if (at == kNoEntry || log_.index.entry(at).sequence != sequence) return;
        const Entry& e = log_.index.entry(at);
        write->kind = WriteJob::Kind::kCopy;
        write->sequence = sequence;
        write->version = e.version;
        write->space = e.space;
        write->identity = log_.spaces[e.space].identity;
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
        read->offset = log_.begin_of(e.place.slot) + uint64_t{e.place.block} * kBlockBytes + e.data_offset;
        read->crc = e.crc;
        ++log_.readers[e.place.slot];
        ++log_.reads_waiting;
    }
    read->to = write->own;
    write->parts.push_back(write->own);
    uint64_t bytes = write->size;
    ++in_flight_;
    bytes_in_flight_ += bytes;
    write->done = [this, bytes](Outcome) { end_copy(bytes); };
    read->done = [this, write, bytes](Outcome outcome) {
        if (outcome != Outcome::kDone) return end_copy(bytes);
        writer_.add_internal(write);
    };
    reader_.add(read);
    reader_.start();
}

void Reclaimer::end_copy(uint64_t bytes) {
    --in_flight_;
    bytes_in_flight_ -= bytes;
}

// What was not copied is forgotten; then the copies are made safe before the segment may be used again.
void Reclaimer::drain() {
    uint32_t slot = std::exchange(slot_, SegmentTable::kNoSegment);
    // Its footer failed meanwhile: it is not used again, and what was not copied is still read there.
    if (segments_.state(slot) == SegmentState::kBad) return;
    {
        MutexLock lock(log_.mutex);
        if (log_.closing || log_.read_only) {
            segments_.move(slot, SegmentState::kClosed);
            return;
        }
        forget_segment(slot);
    }
    // Until the copies are safe no tail may pass it.
    segments_.move(slot, SegmentState::kDraining);
    io_.after_writes([this, slot] {
        io_.sync_file([this, slot](int error) {
            if (error != 0 || segments_.state(slot) == SegmentState::kBad) return;
            segments_.move(slot, SegmentState::kDrained);
            segments_.plan_tail();
        });
    });
}

void Reclaimer::forget_segment(uint32_t slot) {
    for (uint32_t at; (at = log_.index.oldest(slot)) != kNoEntry;) {
        ++log_.counters.evicted;
        log_.counters.evicted_bytes += log_.index.entry(at).size;
        log_.gone.push_back(log_.index.entry(at).hash);
        log_.index.erase(at);
    }
    ++log_.counters.reclaimed;
}

// There is no room even for what makes room. The header of the next segment will tell the new tail.
bool Reclaimer::free_one_at_once() {
    segments_.free_drained(segments_.tail_to_write());
    if (!(segments_.free() == 0)) return true;
    if (slot_ != SegmentTable::kNoSegment) {  // it waits for room that only its own end can make
        copies_.clear();
        writer_.fail_copies();
        return false;
    }
    return !segments_.draining() && forget_oldest() && !(segments_.free() == 0);
}

bool Reclaimer::forget_oldest() {
    uint32_t slot = segments_.oldest_closed();
    if (slot == SegmentTable::kNoSegment) return false;
    {
        MutexLock lock(log_.mutex);
        forget_segment(slot);
    }
    segments_.move(slot, SegmentState::kDrained);
    segments_.plan_tail();
    segments_.free_drained(segments_.tail_to_write());
    return true;
}

}  // namespace moonpool::ssd
