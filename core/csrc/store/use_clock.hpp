// UseClock: when an object was last used, in time. Tables count uses and know no clock; samples of (time,
// uses so far) tell about when a use happened. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moonpool {

class UseClock {
   public:
    void sample(uint64_t now_ms, uint64_t uses) {
        if (!samples_.empty() && samples_.back().uses == uses) return;
        if (samples_.size() == kSamplesMax) {
            // Every second one stays: the further back, the coarser.
            for (size_t i = 1; i < kSamplesMax / 2; ++i) samples_[i] = samples_[2 * i];
            samples_.resize(kSamplesMax / 2);
        }
        samples_.push_back({now_ms, uses});
    }

    // How long ago use number `use` was, at least.
    uint64_t age_ms(uint64_t now_ms, uint64_t use) const {
        auto it =
            std::lower_bound(samples_.begin(), samples_.end(), use,
                             [](const Sample& sample, uint64_t wanted) { return sample.uses < wanted; });
        return it == samples_.end() ? 0 : now_ms - std::min(now_ms, it->ms);
    }

   private:
    static constexpr size_t kSamplesMax = 256;
    struct Sample {
        uint64_t ms;
        uint64_t uses;
    };
    std::vector<Sample> samples_;
};

}  // namespace moonpool
