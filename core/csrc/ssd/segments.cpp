#include "ssd/segments.hpp"

namespace moonpool::ssd {

void SegmentTable::recovered(const std::vector<uint64_t>& numbers, uint64_t next_number) {
    next_number_ = next_number;
    numbers_ = numbers;
    for (uint32_t slot = 0; slot < log_.slots; ++slot) {
        if (numbers_[slot] == 0) {
            free_.push_back(slot);
        } else {
            move(slot, SegmentState::kClosed);
        }
    }
    free_count_ = free_.size();
}

uint32_t SegmentTable::open_next() {
    uint32_t slot = free_.front();
    free_.pop_front();
    free_count_ = free_.size();
    move(slot, SegmentState::kOpen);
    numbers_[slot] = next_number_++;
    return slot;
}

void SegmentTable::retire(uint32_t slot) {
    move(slot, SegmentState::kBad);
    std::erase(free_, slot);
    free_count_ = free_.size();
}

uint32_t SegmentTable::usable() const {
    return static_cast<uint32_t>(std::count_if(
        states_.begin(), states_.end(), [](SegmentState state) { return state != SegmentState::kBad; }));
}

uint32_t SegmentTable::oldest_closed() const {
    uint32_t oldest = kNoSegment;
    for (uint32_t slot = 0; slot < log_.slots; ++slot) {
        if (states_[slot] != SegmentState::kClosed) continue;
        if (oldest == kNoSegment || numbers_[slot] < numbers_[oldest]) oldest = slot;
    }
    return oldest;
}

bool SegmentTable::draining() const {
    return std::any_of(states_.begin(), states_.end(), [](SegmentState state) {
        return state == SegmentState::kDraining || state == SegmentState::kDrained;
    });
}

uint64_t SegmentTable::tail() const {
    uint64_t lowest = next_number_;
    for (uint32_t slot = 0; slot < log_.slots; ++slot) {
        SegmentState state = states_[slot];
        bool over =
            state == SegmentState::kFree || state == SegmentState::kDrained || state == SegmentState::kBad;
        if (!over) lowest = std::min(lowest, numbers_[slot]);
    }
    return lowest;
}

void SegmentTable::free_drained(uint64_t tail) {
    MutexLock lock(log_.mutex);
    for (uint32_t slot = 0; slot < log_.slots; ++slot) {
        bool read = log_.readers[slot] != 0;
        if (states_[slot] != SegmentState::kDrained || numbers_[slot] >= tail || read) continue;
        move(slot, SegmentState::kFree);
        numbers_[slot] = 0;
        free_.push_back(slot);
    }
    free_count_ = free_.size();
}

}  // namespace moonpool::ssd
