#include "conductor/candidates.hpp"

#include <algorithm>
#include <bit>

namespace moonpool {

namespace {

// From 0 to below 1. It depends on the moment, so two proxies draw independently. (The finaliser of
// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.)
double uniform(double now_s, uint64_t number) {
    uint64_t bits = std::bit_cast<uint64_t>(now_s) + 0x9e3779b97f4a7c15 * number;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    bits ^= bits >> 31;
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace

double WorkerView::gap_s(int64_t tokens, double stall_s) const {
    auto batch = static_cast<double>(static_cast<int64_t>(load->decodes()) + pending_handover + 1);
    auto context = static_cast<double>(load->context_tokens() + pending_handover_tokens + tokens);
    return decode->predict(batch, context, stall_s);
}

Dispatched WorkerView::dispatched(int64_t request, PrefillWork work, double predicted_s, double now_s,
                                  bool silent) {
    double wait_s = load->wait_s(now_s);
    work.queued = wait_s > 0;
    if (predicted_s == 0) work.step_s = step_s();
    double prefill_s = predicted_s != 0 ? predicted_s : prefill->predict(work);
    load->prefill_began(request, work.tokens, work.own, work.pool, prefill_s, now_s, silent);
    if (silent) load->decode_began(request, work.tokens, now_s, silent);
    return {wait_s, prefill_s, prefill->transfer_s(work.pool)};
}

Candidates::Weighed Candidates::weigh(const WorkerView& view, const Prompt& prompt, int64_t own) const {
    const PrefillCosts by = view.prefill->costs();
    auto tokens = static_cast<double>(prompt.tokens), held = static_cast<double>(own);
    auto in_pool = static_cast<double>(prompt.pool);
    double rest = tokens - held;
    double step_s = view.step_s();
    double prefill_s =
        by.base_s + by.compute_s(held, tokens) + by.load_token_s * held + by.decode_steps_s(step_s, rest);
    double wait_s = view.load->wait_s(prompt.now_s);
    double pull = in_pool - held;
    bool fetches = pull > 0;
    double transfer_s = 0, lost_s = 0;
    if (fetches) {
        double pull_s = by.fetch_s(pull, prompt.ahead_s);
        transfer_s = pull_s;
        if (wait_s > 0) {  // it hides behind others, and takes its time on the links nevertheless
            transfer_s = by.hidden_fetch_s(pull);
            pull_s = std::max(transfer_s, pull_s);
        }
        double saved_s = by.compute_s(held, in_pool) + step_s * by.step_token * pull;
        fetches = pull_s < saved_s + prompt.spare_s || !view.obeys;
        if (fetches) {
            prefill_s += transfer_s - saved_s;
            lost_s = std::max(pull_s - saved_s, 0.0);
        } else {
            transfer_s = 0;
        }
    }
    double ttft_s = wait_s + prefill_s;
    double later_s = prompt.marginal_delay * prefill_s * (wait_s + 0.5 * prefill_s);
    double stalls_s = static_cast<double>(view.load->decodes()) * prefill_s;
    double cost = prompt.urgency * ttft_s + later_s + prompt.reuse_probability * by.token_s * rest +
                  prompt.stalled * stalls_s;
    return {cost, ttft_s, prefill_s, transfer_s, lost_s, own, fetches};
}

bool Candidates::may(const WorkerView& view, const Prompt& prompt, double ttft_s) const {
    if (&view == prompt.without && all_.size() > 1) return false;
    // The prompts in line are in ttft_s already: the mean stall would count them twice.
    if (prompt.gap_most_s < INFINITY && view.gap_s(prompt.tokens, 0) + ttft_s > prompt.gap_most_s)
        return false;
    return prompt.need_tokens == 0 || view.has_room(prompt.need_tokens + view.pending_handover_tokens);
}

Cheapest Candidates::cheapest(const Prompt& prompt, std::span<const uint32_t> own) {
    weighed_.clear();
    size_t stays = all_.size();
    double least = INFINITY, least_ttft_s = INFINITY, least_prefill_s = 0;
    size_t left = 0;
    for (size_t i = 0; i < all_.size(); ++i) {
        const WorkerView& view = *all_[i];
        int64_t held = view.place < own.size() ? own[view.place] : 0;
        if (&view == prompt.last) {
            stays = i;
            if (prompt.last_own >= 0) held = prompt.last_own;
        }
        const Weighed& weighed = weighed_.emplace_back(weigh(view, prompt, held));
        if (!may(view, prompt, weighed.ttft_s)) {
            weighed_.back() = {INFINITY, INFINITY, 0, 0, 0, -1, false};
            continue;
        }
        ++left;
        if (weighed.cost < least) {
            least = weighed.cost;
            least_prefill_s = weighed.prefill_s;
        }
        least_ttft_s = std::min(least_ttft_s, weighed.ttft_s);
    }
    auto found = [&](size_t which, Reason reason) {
        const Weighed& w = weighed_[which];
        double gap_s = all_[which]->gap_s(prompt.tokens, all_[which]->load->stall_s(prompt.now_s));
        return Cheapest{which,    reason,      w.fetches,    w.own,    w.cost,
                        w.ttft_s, w.prefill_s, w.transfer_s, w.lost_s, gap_s};
    };
    if (left == 0) return found(0, Reason::kOnly);
    double near = least + kEqualS;
    bool known = left > 1 && stays < all_.size() && weighed_[stays].own >= 0;
    if (known && weighed_[stays].cost <= near + prompt.noise * weighed_[stays].ttft_s) {
        return found(stays, Reason::kSession);
    }
    if (left > 1 && prompt.unseen_s > kEqualS && prompt.unseen_s < INFINITY) {
        // Of the unseen work these workers get their part, and each second of it costs what a second of
        // waiting costs this request.
        double part = static_cast<double>(left) / static_cast<double>(all_.size());
        double weight = prompt.urgency + prompt.marginal_delay * least_prefill_s;
        double chance = uniform(prompt.now_s, ++draws_);
        std::optional<size_t> drawn = draw(prompt.unseen_s * part * weight, least, chance);
        if (drawn) return found(*drawn, Reason::kDrawn);
    }
    // Of equals the longest match; of those the one that goes first.
    size_t best = all_.size(), equal = 0, longest = 0;
    for (size_t i = 0; i < all_.size(); ++i) {
        if (weighed_[i].cost > near || weighed_[i].own < 0) continue;
        ++equal;
        bool longer = best == all_.size() || weighed_[i].own > weighed_[best].own;
        if (longer) longest = 0;
        if (longer || weighed_[i].own == weighed_[best].own) {
            ++longest;
            if (longer || goes_first(i, best)) best = i;
        }
    }
    if (left == 1) return found(best, Reason::kOnly);
    if (longest < equal) return found(best, Reason::kMatch);
    if (equal > 1) return found(best, Reason::kTurn);
    bool soonest = weighed_[best].ttft_s <= least_ttft_s + kEqualS;
    return found(best, soonest ? Reason::kLeastTime : Reason::kSparesOthers);
}

// Other proxies weigh the same workers, and this proxy does not know what they have sent in the last moments.
// If every proxy took the least cost, all would take the same worker. So each proxy draws a worker. The
// worker's chance is such that its cost and its part of the unseen work add up to one level for all workers
// that may be drawn, and the others cost more: Wardrop's equilibrium ("Some theoretical aspects of road
// traffic research", 1952). Nothing if fewer than two may be drawn.
std::optional<size_t> Candidates::draw(double unseen, double least, double chance) {
    auto cost = [&](size_t which) { return weighed_[which].cost; };
    near_.clear();
    for (size_t i = 0; i < all_.size(); ++i) {
        if (cost(i) < least + unseen) near_.push_back(i);
    }
    std::sort(near_.begin(), near_.end(), [&](size_t one, size_t other) {
        return cost(one) != cost(other) ? cost(one) < cost(other) : one < other;
    });
    double sum = 0, level = INFINITY;
    size_t count = 0;
    while (count < near_.size() && cost(near_[count]) < level) {
        sum += cost(near_[count++]);
        level = (unseen + sum) / static_cast<double>(count);
    }
    if (count < 2) return std::nullopt;
    double left = chance * unseen;
    for (size_t i = 0; i + 1 < count; ++i) {
        left -= level - cost(near_[i]);
        if (left < 0) return near_[i];
    }
    return near_[count - 1];
}

LeastGap Candidates::least_gap(int64_t tokens, int64_t need_tokens, double now_s) const {
    // Where none has room, all are looked at.
    auto roomy = [&](const WorkerView& view) {
        return view.has_room(need_tokens + view.pending_handover_tokens);
    };
    bool any = std::any_of(all_.begin(), all_.end(), [&](const auto& view) { return roomy(*view); });
    LeastGap best{0, INFINITY};
    for (size_t i = 0; i < all_.size(); ++i) {
        if (any && !roomy(*all_[i])) continue;
        double gap_s = all_[i]->gap_s(tokens, all_[i]->load->stall_s(now_s));
        if (gap_s < best.gap_s - kEqualGapS) {
            best = {i, gap_s};
        } else if (gap_s < best.gap_s + kEqualGapS && goes_first(i, best.which)) {
            best.which = i;
        }
    }
    return best;
}

bool Candidates::goes_first(size_t one, size_t other) const {
    size_t mine = all_[one]->load->requests(), others = all_[other]->load->requests();
    return mine != others ? mine < others : all_[one]->turn < all_[other]->turn;
}

}  // namespace moonpool
