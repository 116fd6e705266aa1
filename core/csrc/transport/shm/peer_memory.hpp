// PeerMemory: a peer's allocated memory as it is mapped here. Its page tables are filled where it is touched,
// kStepBytes at a time and before the first copy there: a fault for each 4 KiB costs several times as much,
// and filling all of them at once takes 0.3 s a GiB, which no first transfer has.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "memory/mapping.hpp"

namespace moonpool::transport::shm {

class PeerMemory {
   public:
    static constexpr uint64_t kStepBytes = 64u << 10;

    // offset: where the memory begins in the mapping, a multiple of pages.
    explicit PeerMemory(Mapping mapping, uint64_t offset = 0)
        : mapping_(std::move(mapping)),
          offset_(offset),
          filled_(std::make_unique<std::atomic<uint8_t>[]>((size() + kStepBytes - 1) / kStepBytes)) {}

    std::byte* data() const { return mapping_.data() + offset_; }
    uint64_t size() const { return mapping_.size() - offset_; }

    // Before [at, at + bytes) is touched; it lies inside and is not empty. Two threads may do the same at
    // once.
    void fill(uint64_t at, uint64_t bytes) {
        uint64_t end = (at + bytes - 1) / kStepBytes + 1;
        for (uint64_t step = at / kStepBytes; step < end;) {
            uint64_t first = step;
            while (step < end && filled_[step].load(std::memory_order_relaxed) == 0) ++step;
            if (step != first) fill_steps(first, step);
            ++step;  // filled, or the end
        }
    }
    // Steps whose pages are in the tables; for tests.
    uint64_t steps_filled() const {
        uint64_t n = 0;
        for (uint64_t i = 0; i * kStepBytes < size(); ++i) n += filled_[i].load();
        return n;
    }

   private:
    void fill_steps(uint64_t first, uint64_t end) {
        uint64_t from = first * kStepBytes;
        mapping_.populate_for_write(offset_ + from, std::min(end * kStepBytes, size()) - from);
        for (uint64_t step = first; step < end; ++step) filled_[step].store(1, std::memory_order_relaxed);
    }

    Mapping mapping_;
    uint64_t offset_;
    std::unique_ptr<std::atomic<uint8_t>[]> filled_;  // of each step
};

}  // namespace moonpool::transport::shm
