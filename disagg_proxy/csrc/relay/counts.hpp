// What is counted of an engine. Plain integers: they belong to the relay's thread, which also reads them out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moonpool::relay {

// A histogram of seconds with fixed bounds; a value equal to a bound belongs to it.
class Latencies {
   public:
    static constexpr std::array<double, 18> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                       0.1,   0.25,   0.5,   1.0,  2.5,   5.0,
                                                       10.0,  30.0,   60.0,  120., 300.,  600.};

    void observe(double seconds) {
        size_t at = 0;
        while (at < kBounds.size() && kBounds[at] < seconds) ++at;
        ++counts_[at];
        sum_s_ += seconds;
    }
    const std::array<uint64_t, kBounds.size() + 1>& counts() const { return counts_; }  // the last: above all
    double sum_s() const { return sum_s_; }

   private:
    std::array<uint64_t, kBounds.size() + 1> counts_{};
    double sum_s_ = 0;
};

// Why an engine failed a request, and how that is called in the metrics.
enum class Reason : uint8_t { kConnect, kLost, kBadAnswer, kFirstByte, kStalled, kSilent, kRemoved };
inline constexpr std::array<const char*, 7> kReasons = {"connect", "lost",   "bad_answer", "first_byte",
                                                        "stalled", "silent", "removed"};

// How a prefill that was to be handed over ended. Overtaken: the whole answer was there before it.
enum class Prefill : uint8_t { kHandedOver, kNoParameters, kRefused, kFailed, kOvertaken };
inline constexpr std::array<const char*, 5> kPrefills = {"handed_over", "no_parameters", "refused", "failed",
                                                         "overtaken"};

struct EngineCounts {
    std::array<uint64_t, 6> answers{};                                // by the first digit of the status
    std::array<std::array<uint64_t, kReasons.size()>, 2> failures{};  // before, after the first byte
    std::array<uint64_t, 2> disconnects{};                            // waiting, streaming
    std::array<uint64_t, kPrefills.size()> prefills{};
    uint64_t retries = 0;
    uint64_t relayed_bytes = 0;
    Latencies first_byte, whole, prefill;
};

}  // namespace moonpool::relay
