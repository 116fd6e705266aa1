// A record for each request that was sent to an engine, and while it runs two more of those whose plan has a
// note: what a policy learns from.
//
// Little-endian, 128 bytes, in the order of the fields; times are seconds of the relay's clock, 0 where it
// did not come to that; token counts are the engine's own, -1 where its answer did not tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/mutex.hpp"

namespace moonpool::relay {

enum class Outcome : uint8_t {
    kAnswered,   // whole, whatever its status
    kLeft,       // the client went away
    kFailed,     // no engine answered
    kBrokenOff,  // an engine failed in mid answer
    kRefused,    // the policy's own answer, after an engine had been tried
};

enum class Stage : uint8_t {
    kEnded,      // the last record of a request
    kPrefilled,  // the prefill engine has answered; only with a note
    kBegun,      // the first byte of the answer is there; only with a note, and not when an answer that is no
                 // stream ends at once
};

struct Observation {
    uint64_t request = 0;
    int64_t note = 0;
    int32_t prefill = -1, decode = -1;  // places of the engines of the last plan
    double arrived = 0, sent_prefill = 0, prefill_done = 0, sent_decode = 0, first_byte = 0, last_byte = 0;
    int32_t prompt_tokens = -1, cached_tokens = -1, completion_tokens = -1;
    int32_t prefill_cached_tokens = -1;
    uint16_t status = 0;  // of the answer to the client
    uint8_t outcome = 0;  // Outcome
    uint8_t attempts = 0;
    uint8_t handed_over = 0;  // parameters for a hand-over went to the engine that answered: 1 those of the
                              // prefill engine's answer, 2 the plan's, 3 the plan's for both,
                              // 4 those of the answer, as TensorRT-LLM has them
    uint8_t stream = 0;
    uint8_t stage = 0;    // Stage
    uint8_t sampled = 0;  // the trace is to be recorded
    uint8_t trace_id[16] = {};
    uint8_t parent_id[8] = {};  // of the span that the client named, zero when it named none
    uint8_t span_id[8] = {};    // what the engines were told; equal to parent_id when passed through
};
static_assert(sizeof(Observation) == 128, "the record has no padding");

// Added to by the relay's thread, taken by any.
class Observations {
   public:
    explicit Observations(size_t records_max) : records_max_(records_max) {}

    void add(const Observation& one) {
        MutexLock lock(mutex_);
        if (ends_what_began_last(one)) bytes_.resize(bytes_.size() - sizeof(one));
        if (bytes_.size() >= records_max_ * sizeof(Observation)) {
            ++dropped_;
            return;
        }
        bytes_.append(reinterpret_cast<const char*>(&one), sizeof(one));
    }
    std::string take() {
        std::string all;
        MutexLock lock(mutex_);
        all.swap(bytes_);
        return all;
    }
    uint64_t dropped() const {
        MutexLock lock(mutex_);
        return dropped_;
    }

   private:
    // An answer that comes whole begins and ends at once, and its last record says all that the one before it
    // does.
    bool ends_what_began_last(const Observation& one) const REQUIRES(mutex_) {
        if (one.stage != static_cast<uint8_t>(Stage::kEnded) || one.stream != 0) return false;
        if (bytes_.size() < sizeof(one)) return false;
        Observation last;
        std::memcpy(&last, bytes_.data() + bytes_.size() - sizeof(last), sizeof(last));
        return last.request == one.request && last.stage == static_cast<uint8_t>(Stage::kBegun);
    }

    const size_t records_max_;
    mutable Mutex mutex_;
    std::string bytes_ GUARDED_BY(mutex_);
    uint64_t dropped_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool::relay
