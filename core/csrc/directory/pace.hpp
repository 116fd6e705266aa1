// Pace: how often the nodes may send, so that one master can keep up with all of them. Pure: the caller's
// time. It goes to the nodes with each answer (docs/wire_master.md).
//
// Changes: while more DELTA frames arrive than the master means to take, nodes gather for longer. Busy nodes
// send a frame each batch_ms, so that twice the time is half the frames. Beats: as many nodes as there are,
// and of many nodes not each beat is answered, for to send costs more than to receive.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moonpool {

struct PaceOptions {
    uint32_t batch_ms = 5;               // for which changes are gathered, at least
    uint32_t batch_ms_max = 1000;        // and at most
    uint32_t deltas_per_s_max = 20000;   // frames; about a fifth of a core
    uint32_t beats_per_s_max = 30000;    // the same
    uint32_t answers_per_s_max = 10000;  // to beats
};

class Pace {
   public:
    explicit Pace(const PaceOptions& options) : options_(options), batch_ms_(options.batch_ms) {}

    void delta() { ++deltas_; }  // a frame of changes came

    // Judged every other second: by then the nodes have heard of the last judgement, and followed it.
    void tick(uint64_t now_ms) {
        constexpr uint64_t kWindowMs = 2000;
        uint64_t elapsed_ms = now_ms - since_ms_;
        if (elapsed_ms < kWindowMs) return;
        uint64_t per_s = deltas_ * 1000 / elapsed_ms;
        deltas_ = 0;
        since_ms_ = now_ms;
        uint64_t most = options_.deltas_per_s_max;
        uint64_t wanted = batch_ms_;
        if (per_s > most) wanted = (batch_ms_ * per_s + most - 1) / most;
        if (per_s < most / 2) wanted = batch_ms_ / 2;  // then it is below the most, still
        batch_ms_ = std::clamp<uint64_t>(wanted, options_.batch_ms, options_.batch_ms_max);
    }

    uint32_t batch_ms() const { return static_cast<uint32_t>(batch_ms_); }
    // Between two beats of one of so many nodes; never so seldom that two lost beats make a node suspect.
    uint32_t beat_ms(uint64_t nodes, uint32_t least_ms, uint32_t suspect_ms) const {
        uint64_t wanted = nodes * 1000 / options_.beats_per_s_max;
        return static_cast<uint32_t>(
            std::clamp<uint64_t>(wanted, least_ms, std::max(least_ms, suspect_ms / 3)));
    }

    // Of how many beats one is to be answered, when so many nodes beat at that pace.
    uint32_t beats_per_answer(uint64_t nodes, uint32_t beat_ms) const {
        uint64_t per_s = nodes * 1000 / std::max(beat_ms, 1u);
        uint64_t most = std::max(options_.answers_per_s_max, 1u);
        return static_cast<uint32_t>(std::clamp<uint64_t>((per_s + most - 1) / most, 1, kBeatsPerAnswerMax));
    }
    static constexpr uint32_t kBeatsPerAnswerMax = 5;

   private:
    PaceOptions options_;
    uint64_t batch_ms_;
    uint64_t deltas_ = 0;  // since
    uint64_t since_ms_ = 0;
};

}  // namespace moonpool
