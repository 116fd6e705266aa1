// FramePace: when a peer that is in the middle of a frame, or has answers to read, has to be given up. It has
// `stalled_frame_ms` to begin with; each byte that moves gives it the time that a byte takes at
// `frame_bytes_per_s_min`, and it never has more than `stalled_frame_ms` ahead. So a frame of n bytes is
// complete after stalled_frame_ms + n / frame_bytes_per_s_min, or never: a peer that sends one byte now and
// then does not keep what the frame holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "wire/limits.hpp"

namespace moonpool {

class FramePace {
   public:
    FramePace(const Limits& limits, uint64_t now_ms)
        : ahead_us_(uint64_t{limits.stalled_frame_ms} * 1000), bytes_per_s_(limits.frame_bytes_per_s_min) {
        restart(now_ms);
    }

    // The peer is at rest, or something on this side let it wait.
    void restart(uint64_t now_ms) {
        looked_ms_ = now_ms;
        end_us_ = now_ms * 1000 + ahead_us_;
    }

    // That many bytes came from the peer, or were taken by its socket.
    void moved(uint64_t bytes, uint64_t now_ms) { give(bytes * 1'000'000 / bytes_per_s_, now_ms); }

    // Asked at each tick. Time in which this process stood still itself is not the peer's.
    bool is_late(uint64_t now_ms) {
        const uint64_t since_ms = now_ms - std::exchange(looked_ms_, now_ms);
        if (since_ms > kStoodStillMs) give(since_ms * 1000, now_ms);
        return now_ms * 1000 > end_us_;
    }

    static std::string late_text(const Limits& limits) {
        return "less than " + std::to_string(limits.frame_bytes_per_s_min) +
               " bytes a second moved inside a frame, for over " + std::to_string(limits.stalled_frame_ms) +
               " ms";
    }

   private:
    static constexpr uint64_t kStoodStillMs =
        2000;  // between two looks, which are some 50 ms to 400 ms apart

    void give(uint64_t us, uint64_t now_ms) { end_us_ = std::min(end_us_ + us, now_ms * 1000 + ahead_us_); }

    uint64_t ahead_us_;
    uint64_t bytes_per_s_;
    uint64_t end_us_ = 0;
    uint64_t looked_ms_ = 0;
};

}  // namespace moonpool
