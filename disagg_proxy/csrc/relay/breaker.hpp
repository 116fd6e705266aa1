// Breaker: rests an engine that answers its health checks but fails its requests. Pure: time is an argument.
//
//     closed --N failures in a row--> open --its time is over--> one trial --good--> closed
//                                      ^-----------bad (rests twice as long)-----'
//
// A failure is a request without an answer or a 5xx. A 4xx is an answer: the client was wrong, not the
// engine, and a fleet must not go down because one user sends bad requests. A client that leaves is no
// verdict.
#pragma once

#include <cstdint>
#include <limits>

#include "relay/settings.hpp"

namespace moonpool::relay {

enum class Verdict : uint8_t { kGood, kBad, kNone };

inline Verdict verdict_on_status(int status) { return status >= 500 ? Verdict::kBad : Verdict::kGood; }

class Breaker {
   public:
    explicit Breaker(const BreakerLimits& limits) : limits_(limits), rest_s_(limits.open_s) {}

    bool closed() const { return closed_; }
    uint32_t failures() const { return failures_; }  // bad verdicts in a row while closed

    // Whether a request may go to this engine: closed, or its rest is over and no trial is running.
    bool allows(double now) const { return closed_ || (now >= until_ && !trial_); }

    // Until when it allows nothing; 0: it is closed.
    double rests_until() const {
        if (closed_) return 0;
        return trial_ ? std::numeric_limits<double>::infinity() : until_;
    }

    // A request goes there. Returns whether it is the trial; hand that back to finished().
    bool started(double now) {
        if (closed_ || trial_ || now < until_) return false;
        trial_ = true;
        return true;
    }

    // Exactly once for each started().
    void finished(Verdict verdict, double now, bool trial) {
        if (trial) {
            finish_trial(verdict, now);
        } else if (verdict == Verdict::kGood && closed_) {
            failures_ = 0;
        } else if (verdict == Verdict::kBad && closed_ && ++failures_ >= limits_.failures_max) {
            closed_ = false;
            until_ = now + rest_s_;
        }
    }

    // Whether all invariants hold.
    bool check_integrity() const {
        double most = limits_.open_s > limits_.open_s_max ? limits_.open_s : limits_.open_s_max;
        return !(trial_ && closed_) && (!closed_ || failures_ < limits_.failures_max) &&
               rest_s_ >= limits_.open_s && rest_s_ <= most;
    }

   private:
    void finish_trial(Verdict verdict, double now) {
        trial_ = false;
        if (verdict == Verdict::kGood) {
            closed_ = true;
            rest_s_ = limits_.open_s;
            failures_ = 0;
        } else if (verdict == Verdict::kBad) {
            double most = limits_.open_s > limits_.open_s_max ? limits_.open_s : limits_.open_s_max;
            rest_s_ = rest_s_ * 2 < most ? rest_s_ * 2 : most;
            until_ = now + rest_s_;
        }
    }

    BreakerLimits limits_;
    bool closed_ = true, trial_ = false;
    double rest_s_, until_ = 0;
    uint32_t failures_ = 0;
};

}  // namespace moonpool::relay
