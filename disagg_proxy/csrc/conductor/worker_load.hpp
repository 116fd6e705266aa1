// WorkerLoad: what one engine has to do, as far as the proxy sent it there: prefills in line, requests that
// decode.
//
// An engine is taken to prefill in the order of arrival. Its line is counted in seconds, not in requests:
// each prefill begins when the one before it has ended and it was sent, and lasts as predicted. The ends of
// prefills correct it, so that a prediction that was wrong does not add up.
//
// Reports may come late by a known time, `lag_s`. What was not reported by then is still under way, however
// long it takes; since then the line went on as predicted. Where several engines of the proxy have work and
// none has reported anything (`LastReport`), the reports are missing: the line is taken to have gone on as
// predicted.
//
// Pure: times (seconds, of one clock) are arguments. No lock: the owner keeps other threads away. Each call
// about a request that is not known changes nothing, so that reports may come late, twice or never.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace moonpool {

// A prefill has ended. seconds: how long the engine had it in work, the wait before it left out. batch,
// context_tokens: of the requests that decoded there meanwhile, averages.
struct Prefilled {
    int64_t tokens = 0, own = 0, pool = 0;
    double seconds = 0, predicted_s = 0;
    double batch = 0, context_tokens = 0;
};

// A request has ended. batch, context_tokens: averages over its time. stall_s: seconds of prefill there
// meanwhile, for each of its gaps.
struct Decoded {
    double batch = 0, context_tokens = 0, gap_s = 0, stall_s = 0;
};

// When a proxy last got a report of any of its engines, and how many of them have prompts to compute: all of
// their loads share it.
struct LastReport {
    double at_s = -INFINITY;
    size_t busy = 0;
};

class WorkerLoad {
   public:
    WorkerLoad() = default;
    ~WorkerLoad() { follow_reports(nullptr); }
    WorkerLoad(const WorkerLoad&) = delete;

    // What policies read.
    size_t prefills() const { return prefills_.size(); }
    // Tokens of the prompts in line, those that are reused included; and those that are to be computed.
    int64_t prefill_tokens() const { return prefill_tokens_; }
    int64_t prefill_rest_tokens() const { return prefill_rest_; }
    size_t decodes() const { return decodes_.size(); }
    size_t requests() const { return prefills_.size() + decodes_.size() - in_both_; }
    // Tokens in the KV cache of the requests that decode now, as far as known.
    int64_t context_tokens() const { return context_; }
    // Seconds until a prefill that came now would begin.
    double wait_s(double now_s);
    // Seconds of prefill for each gap of a request that decodes here: a mean of the last answers, which fades
    // from the end of the last one on: while none ends, an engine that has nothing to do must not seem slow.
    double stall_s(double now_s) const {
        return stalled_sum_s_ > 0 ? fade(now_s) * stalled_sum_s_ / gaps_sum_ : 0.0;
    }
    // By how much reports of this engine are late: a mean of the last ones.
    double lag_s() const { return std::max(lag_s_, 0.0); }

    // Of the proxy whose engine this is; without it reports are taken to come all the time.
    void follow_reports(std::shared_ptr<LastReport> last);
    // A report of this engine came, which says what has happened until then.
    void heard(double at_s) {
        if (last_report_ && at_s < INFINITY) last_report_->at_s = std::max(last_report_->at_s, at_s);
    }
    // A report came so many seconds after its event.
    void reported(double age_s);
    // What happens. silent: its end will not be heard of, so it is taken to last as long as predicted.
    void prefill_began(int64_t request, int64_t tokens, int64_t own, int64_t pool, double predicted_s,
                       double now_s, bool silent);
    // done: it was computed; else the request is gone and nothing can be learnt from it.
    std::optional<Prefilled> prefill_ended(int64_t request, double now_s, bool done);
    // silent: nothing was heard of its beginning, so what it waits for, its own prompt too, is no stall.
    void decode_began(int64_t request, int64_t context, double now_s, bool silent = false);
    // tokens: how many were made, the first included; 0 when unknown.
    std::optional<Decoded> decode_ended(int64_t request, int64_t tokens, double now_s);
    // The engine is gone, and what it had to do with it.
    void forget_all();

    // The first invariant that does not hold, in words; "" when all do.
    std::string check_integrity() const;

   private:
    struct Prefill;
    // The line goes through the map's own nodes, which stay where they are.
    using Queue = std::unordered_map<int64_t, Prefill>;
    // Of batch and of context_tokens over time.
    struct Integrals {
        double batch = 0, context = 0;
    };
    struct Prefill {
        int64_t tokens = 0, own = 0, pool = 0;
        double predicted_s = 0, sent_s = 0;
        Integrals sent;
        bool silent = false;
        Queue::value_type *before = nullptr, *behind = nullptr;
    };
    struct Decode {
        int64_t context = 0;
        double first_s = 0, batch_integral = 0, context_integral = 0, prefilled_s = 0;
        bool silent = false;
    };

    void drop(Queue::value_type& prefill);
    void recompute_line();
    // The line has its first prefill, or its last one has left it.
    void count_busy(bool busy);
    // Until when the proxy would know of the end of a prefill here.
    double heard_s(double now_s) const;
    // When the first of the line was begun.
    double head_began_s() const { return std::max(head_since_s_, first_->second.sent_s); }
    void integrate(double now_s);
    double prefilled_s(double at_s) const;
    Integrals integrals_at(double at_s) const;
    void begin_head(double at_s);
    // Of what was known at the end of the last answer.
    double fade(double now_s) const;

    Queue prefills_;
    Queue::value_type *first_ = nullptr, *last_ = nullptr;
    double prefill_sum_s_ = 0;
    int64_t prefill_tokens_ = 0, prefill_rest_ = 0;
    double head_since_s_ = 0;         // the end of the prefill before the first of the line
    Integrals head_since_;            // then
    double last_sent_s_ = -INFINITY;  // of all prefills
    double free_s_ = 0;               // when the line will be empty
    double lag_s_ = 0;
    std::shared_ptr<LastReport> last_report_;
    std::unordered_map<int64_t, Decode> decodes_;
    size_t in_both_ = 0;
    int64_t context_ = 0;
    double batch_integral_ = 0, context_integral_ = 0;
    double integrated_to_s_ = -INFINITY;
    double prefilled_s_ = 0;                   // seconds of the prefills that have ended
    double stalled_sum_s_ = 0, gaps_sum_ = 0;  // of the last requests, which count for more
    double stalled_at_s_ = 0;                  // the end of the last of them
};

}  // namespace moonpool
