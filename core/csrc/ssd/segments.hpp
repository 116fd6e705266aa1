// SegmentTable: in which state each segment of the file is, and which are free. The log's thread owns it;
// only free_bytes() may be asked by others.
//
//   free --> open --> closed --> reclaiming --> draining --> drained --> free
//                       \___________ at once, without copies ____/
//
// Records of a segment below the tail count for nothing, so a drained segment is used again only after a tail
// that has passed it stands on the disk, and after its last reader has left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/state.hpp"
#include "ssd/log_state.hpp"

namespace moonpool::ssd {

inline constexpr uint32_t kSegmentsForReclaim = 2;  // callers' writes leave these free

enum class SegmentState : uint8_t { kFree, kOpen, kClosed, kReclaiming, kDraining, kDrained, kBad };

// A write may fail in any state but the last; what failed in the open one is told when it is closed.
inline constexpr Transitions<SegmentState, 7> kSegment{
    "segment",
    {
        {SegmentState::kFree, "free", {SegmentState::kOpen, SegmentState::kClosed, SegmentState::kBad}},
        {SegmentState::kOpen, "open", {SegmentState::kClosed, SegmentState::kBad}},
        {SegmentState::kClosed,
         "closed",
         {SegmentState::kReclaiming, SegmentState::kDrained, SegmentState::kBad}},
        {SegmentState::kReclaiming,
         "reclaiming",
         {SegmentState::kDraining, SegmentState::kClosed, SegmentState::kBad}},
        {SegmentState::kDraining, "draining", {SegmentState::kDrained, SegmentState::kBad}},
        {SegmentState::kDrained, "drained", {SegmentState::kFree, SegmentState::kBad}},
        {SegmentState::kBad, "bad", {SegmentState::kBad}},
    }};
static_assert(kSegment.is_complete());

class SegmentTable {
   public:
    explicit SegmentTable(LogState& log) : log_(log), states_(log.slots), numbers_(log.slots, 0) {}

    // What recovery found: numbers of segments by slot, 0 where there is none.
    void recovered(const std::vector<uint64_t>& numbers, uint64_t next_number);

    SegmentState state(uint32_t slot) const { return states_[slot]; }
    void move(uint32_t slot, SegmentState next) { states_[slot].move_to(next); }
    // The first free slot becomes the open segment, under the next number. There must be one.
    uint32_t open_next();
    uint64_t number(uint32_t slot) const { return numbers_[slot]; }
    // The number that was opened last, of which nothing but perhaps the header is on the disk, is the next
    // one's.
    void take_back_number() { --next_number_; }
    // A write to it failed: it is not used again, nor free if it was. Its number counts for the tail no more.
    void retire(uint32_t slot);
    uint32_t usable() const;         // slots that are not bad
    uint32_t oldest_closed() const;  // kNoSegment: none
    static constexpr uint32_t kNoSegment = UINT32_MAX;
    // Some segment is draining or drained: its room comes back without another reclaim.
    bool draining() const;

    size_t free() const { return free_.size(); }
    uint64_t free_bytes() const { return free_count_ * log_.superblock.segment_bytes; }  // any thread

    // The lowest number of a segment whose records count.
    uint64_t tail() const;
    void plan_tail() { tail_to_write_ = tail(); }
    uint64_t tail_to_write() const { return tail_to_write_; }
    void tail_is_written(uint64_t tail) { tail_written_ = tail; }
    uint64_t tail_written() const { return tail_written_; }
    // Gives back drained segments below `tail` that nothing reads.
    void free_drained(uint64_t tail);

   private:
    LogState& log_;
    std::vector<State<kSegment>> states_;
    std::vector<uint64_t> numbers_;
    std::deque<uint32_t> free_;
    std::atomic<uint64_t> free_count_{0};
    uint64_t next_number_ = 1;
    uint64_t tail_to_write_ = 0, tail_written_ = 0;
};

}  // namespace moonpool::ssd
