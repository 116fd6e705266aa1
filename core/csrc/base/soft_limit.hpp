// SoftLimit: a limit for the usual case, that gives way. Who needs more than it gets more, as long as the
// resource behind it lasts; the owner says so in its log, once for each rise. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moonpool {

class SoftLimit {
   public:
    explicit SoftLimit(uint64_t set) : set_(set), now_(set) {}

    enum class Answer : uint8_t { kFits, kRaised, kFull };
    // Whether there may be one more than `have`. most(): how many the resource allows, asked beyond the limit
    // only. A rise doubles the limit, so that it is seldom.
    template <class Most>
    Answer admit(uint64_t have, Most most) {
        if (have < now_) return Answer::kFits;
        uint64_t allowed = most();
        if (have >= allowed) return Answer::kFull;
        now_ = std::min(std::max(now_ * 2, have + 1), allowed);
        ++raised_total_;
        return Answer::kRaised;
    }

    uint64_t set() const { return set_; }  // as it was configured
    uint64_t now() const { return now_; }
    uint64_t raised_total() const { return raised_total_; }

   private:
    uint64_t set_, now_, raised_total_ = 0;
};

}  // namespace moonpool
