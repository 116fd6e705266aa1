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
        if (samples_.size() == kSamplesMax) thin_out(now_ms);
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

    // The further back, the coarser: neighbours stay within an eighth of their age. From 0.2 s to a month
    // that is about 140 samples.
    void thin_out(uint64_t now_ms) {
        size_t kept = 1;
        for (size_t i = 1; i < samples_.size(); ++i) {
            bool last = i + 1 == samples_.size();
            if (!last && samples_[i + 1].ms - samples_[kept - 1].ms <= (now_ms - samples_[i].ms) / 8)
                continue;
            samples_[kept++] = samples_[i];
        }
        samples_.resize(kept);
        if (kept == kSamplesMax) samples_.erase(samples_.begin());
    }

    std::vector<Sample> samples_;
};

}  // namespace moonpool
