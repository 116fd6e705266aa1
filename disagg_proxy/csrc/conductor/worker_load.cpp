#include "conductor/worker_load.hpp"

#include <algorithm>

namespace moonpool {

constexpr double kAnswerFades = 0.97;  // what an answer counts for in the mean stall, of the one after it
// An engine under load ends several answers in this time; one that is idle must not seem slow for long.
constexpr double kStallFadesS = 10.0;
constexpr double kLagShare = 0.1;   // of the mean lag, that the last report makes
constexpr double kLagMostS = 60.0;  // an older report says nothing of the usual lag

double WorkerLoad::wait_s(double now_s) {
    while (first_ != nullptr) {
        const Prefill& head = first_->second;
        double ends_s = head_began_s() + head.predicted_s;
        if (!head.silent || now_s < ends_s) {
            double late_s = std::max(heard_s(now_s) - lag_s() - ends_s, 0.0);
            return std::clamp(free_s_ - now_s + late_s, 0.0, prefill_sum_s_);
        }
        prefilled_s_ += head.predicted_s;
        begin_head(ends_s);
        drop(*first_);
    }
    return 0;
}

double WorkerLoad::heard_s(double now_s) const {
    bool alone = !last_report_ || last_report_->busy < 2;
    return alone ? now_s : std::min(now_s, last_report_->at_s);
}

void WorkerLoad::follow_reports(std::shared_ptr<LastReport> last) {
    if (first_ != nullptr) count_busy(false);
    last_report_ = std::move(last);
    if (first_ != nullptr) count_busy(true);
}

void WorkerLoad::count_busy(bool busy) {
    if (last_report_) last_report_->busy += busy ? 1 : -1;
}

void WorkerLoad::reported(double age_s) {
    // Below 0: its time is wrong. Such errors must not add up to a lag.
    if (std::abs(age_s) < kLagMostS) lag_s_ += kLagShare * (age_s - lag_s_);
}

void WorkerLoad::prefill_began(int64_t request, int64_t tokens, int64_t own, int64_t pool, double predicted_s,
                               double now_s, bool silent) {
    auto [at, is_new] = prefills_.try_emplace(
        request, Prefill{tokens, own, pool, predicted_s, now_s, integrals_at(now_s), silent});
    if (!is_new) return;
    if (first_ == nullptr) {
        begin_head(now_s);
        free_s_ = now_s;
        prefill_sum_s_ = 0;  // sums of floats drift
        first_ = &*at;
        count_busy(true);
    } else {
        at->second.before = last_;
        last_->second.behind = &*at;
    }
    last_ = &*at;
    last_sent_s_ = std::max(last_sent_s_, now_s);
    in_both_ += decodes_.count(request);
    prefill_sum_s_ += predicted_s;
    free_s_ = std::max(free_s_, now_s) + predicted_s;
    prefill_tokens_ += tokens;
    prefill_rest_ += tokens - own - pool;
}

std::optional<Prefilled> WorkerLoad::prefill_ended(int64_t request, double now_s, bool done) {
    auto at = prefills_.find(request);
    if (at == prefills_.end()) return std::nullopt;
    const Prefill& prefill = at->second;
    bool was_head = first_ == &*at;
    double seconds = now_s - head_began_s();
    Prefilled ended{prefill.tokens, prefill.own, prefill.pool, seconds, prefill.predicted_s};
    if (was_head && seconds > 0) {
        const Integrals from = prefill.sent_s > head_since_s_ ? prefill.sent : head_since_;
        const Integrals until = integrals_at(now_s);
        ended.batch = std::max(until.batch - from.batch, 0.0) / seconds;
        ended.context_tokens = std::max(until.context - from.context, 0.0) / seconds;
    }
    if (was_head || done) {
        // Whose prompt it was is not known when ends come out of order; that one was computed is.
        prefilled_s_ += std::max(seconds, 0.0);
        begin_head(now_s);
    }
    drop(*at);
    // Engines batch short prefills: one that overtakes the head, or leaves, says nothing of its own cost.
    if (!done || !was_head || !(seconds >= 0)) return std::nullopt;
    return ended;
}

void WorkerLoad::decode_began(int64_t request, int64_t context, double now_s, bool silent) {
    if (decodes_.contains(request)) return;
    wait_s(now_s);  // what was silent and is over leaves the line
    integrate(now_s);
    decodes_[request] = {context, now_s, batch_integral_, context_integral_, prefilled_s(now_s), silent};
    in_both_ += prefills_.count(request);
    context_ += context;
}

std::optional<Decoded> WorkerLoad::decode_ended(int64_t request, int64_t tokens, double now_s) {
    auto at = decodes_.find(request);
    if (at == decodes_.end()) return std::nullopt;
    wait_s(now_s);
    integrate(now_s);
    Decode decode = at->second;
    decodes_.erase(at);
    in_both_ -= prefills_.count(request);
    context_ -= decode.context;
    double lasted_s = now_s - decode.first_s;
    if (tokens < 2 || !(lasted_s > 0)) return std::nullopt;
    auto gaps = static_cast<double>(tokens - 1);
    double stalled_s = std::clamp(prefilled_s(now_s) - decode.prefilled_s, 0.0, lasted_s);
    if (!decode.silent) {
        double before = kAnswerFades * fade(now_s);  // what has faded does not come back
        stalled_sum_s_ = before * stalled_sum_s_ + stalled_s;
        gaps_sum_ = before * gaps_sum_ + gaps;
        stalled_at_s_ = now_s;
    }
    return Decoded{(batch_integral_ - decode.batch_integral) / lasted_s,
                   (context_integral_ - decode.context_integral) / lasted_s, lasted_s / gaps,
                   stalled_s / gaps};
}

void WorkerLoad::forget_all() {
    if (first_ != nullptr) count_busy(false);
    prefills_.clear();
    first_ = last_ = nullptr;
    prefill_sum_s_ = 0;
    prefill_tokens_ = prefill_rest_ = 0;
    decodes_.clear();
    in_both_ = 0;
    context_ = 0;
    stalled_sum_s_ = gaps_sum_ = 0;
}

void WorkerLoad::drop(Queue::value_type& dropped) {
    const Prefill& prefill = dropped.second;
    (prefill.before != nullptr ? prefill.before->second.behind : first_) = prefill.behind;
    (prefill.behind != nullptr ? prefill.behind->second.before : last_) = prefill.before;
    double left_s = prefill_sum_s_ - prefill.predicted_s;
    prefill_sum_s_ = left_s > 0 ? left_s : 0;
    prefill_tokens_ -= prefill.tokens;
    prefill_rest_ -= prefill.tokens - prefill.own - prefill.pool;
    int64_t request = dropped.first;
    in_both_ -= decodes_.count(request);
    prefills_.erase(request);
    if (first_ == nullptr) count_busy(false);
    recompute_line();
}

// The line as predicted from the end of the last prefill that is known to have ended.
void WorkerLoad::recompute_line() {
    free_s_ = head_since_s_ + prefill_sum_s_;
    if (last_sent_s_ <= head_since_s_) return;  // without lag: each begins where the one before it ends
    free_s_ = head_since_s_;
    for (const Queue::value_type* at = first_; at != nullptr; at = at->second.behind) {
        free_s_ = std::max(free_s_, at->second.sent_s) + at->second.predicted_s;
    }
}

void WorkerLoad::integrate(double now_s) {
    double passed_s = now_s - integrated_to_s_;
    if (!(passed_s > 0)) return;
    integrated_to_s_ = now_s;
    if (decodes_.empty()) return;
    batch_integral_ += passed_s * static_cast<double>(decodes_.size());
    context_integral_ += passed_s * static_cast<double>(context_);
}

// At a time before or after the last change, as if those that decode now did then: no report is put off by
// it.
WorkerLoad::Integrals WorkerLoad::integrals_at(double at_s) const {
    if (decodes_.empty()) return {batch_integral_, context_integral_};
    double passed_s = at_s - integrated_to_s_;
    return {batch_integral_ + passed_s * static_cast<double>(decodes_.size()),
            context_integral_ + passed_s * static_cast<double>(context_)};
}

// Seconds of prefill until then, that of the first of the line included.
double WorkerLoad::prefilled_s(double at_s) const {
    return first_ == nullptr ? prefilled_s_ : prefilled_s_ + std::max(at_s - head_began_s(), 0.0);
}

double WorkerLoad::fade(double now_s) const {
    return std::exp(-std::max(0.0, now_s - stalled_at_s_) / kStallFadesS);  // in this order NaN is no time
}

void WorkerLoad::begin_head(double at_s) {
    head_since_s_ = at_s;
    head_since_ = integrals_at(at_s);
}

std::string WorkerLoad::check_integrity() const {
    double sum_s = 0;
    int64_t tokens = 0, rest = 0, context = 0;
    size_t in_line = 0, in_both = 0;
    const Queue::value_type* before = nullptr;
    for (const Queue::value_type* at = first_; at != nullptr; before = at, at = at->second.behind) {
        const Prefill& prefill = at->second;
        if (prefill.before != before) return "the line is not linked back";
        ++in_line;
        sum_s += prefill.predicted_s;
        tokens += prefill.tokens;
        rest += prefill.tokens - prefill.own - prefill.pool;
        in_both += decodes_.count(at->first);
    }
    for (const auto& [request, decode] : decodes_) context += decode.context;
    if (in_line != prefills_.size() || before != last_) return "the line lacks a prefill";
    if (in_line != 0 && std::abs(sum_s - prefill_sum_s_) > 1e-6 * std::max(1.0, sum_s)) {
        return "the line is " + std::to_string(sum_s) + " s long, not " + std::to_string(prefill_sum_s_);
    }
    if (tokens != prefill_tokens_ || rest != prefill_rest_) return "the tokens of the prefills do not add up";
    if (context != context_) return "the tokens of the decodes do not add up";
    if (in_both != in_both_) return "the requests in both do not add up";
    return "";
}

}  // namespace moonpool
