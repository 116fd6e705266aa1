// ByteRate: bytes that a tenant may move through the node in a second, as a bucket that fills at that rate
// up to what it gives in one second. Pure.
//
// While it is above zero any number of bytes may be taken, also more than it has: it is then in debt until it
// has filled again. So large objects pass, and the mean over seconds holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace moonpool {

class ByteRate {
   public:
    // per_s: bytes a second; none: no limit. Another rate than before begins with a full bucket.
    bool is_over(std::optional<uint64_t> per_s, uint64_t now_ms) {
        if (per_s != per_s_) {
            per_s_ = per_s;
            level_ = static_cast<double>(per_s.value_or(0));
        } else if (per_s) {
            const auto rate = static_cast<double>(*per_s);
            level_ = std::min(rate, level_ + rate * static_cast<double>(now_ms - filled_ms_) / 1000);
        }
        filled_ms_ = now_ms;
        return per_s_ && level_ <= 0;
    }
    void take(uint64_t bytes) {
        if (per_s_) level_ -= static_cast<double>(bytes);
    }

   private:
    std::optional<uint64_t> per_s_;
    double level_ = 0;
    uint64_t filled_ms_ = 0;
};

}  // namespace moonpool
