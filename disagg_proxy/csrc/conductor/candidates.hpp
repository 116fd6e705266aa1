// Candidates: the workers that a policy chooses among, weighed all at once. What a weight is made of, and
// why, stands with the policy (disagg_proxy/conductor/policies/conductor.py) and in cost_model.hpp; here it
// is computed for a thousand of them without asking Python for each.
//
// Pure: times are arguments, nothing is kept between two questions but what the workers themselves hold.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "conductor/cost_model.hpp"
#include "conductor/worker_load.hpp"

namespace moonpool {

// A request is on its way to a worker. wait_s: until its prefill begins; prefill_s: of its prefill, as
// predicted; fetch_s: of what it fetches from the pool, with nothing before it.
struct Dispatched {
    double wait_s = 0, prefill_s = 0, fetch_s = 0;
};

// WorkerView: what policies compare workers by, of one worker.
struct WorkerView {
    WorkerView(uint32_t place, int64_t room_tokens, std::shared_ptr<WorkerLoad> load,
               std::shared_ptr<const PrefillModel> prefill, std::shared_ptr<const DecodeModel> decode)
        : place(place),
          room_tokens(room_tokens),
          load(std::move(load)),
          prefill(std::move(prefill)),
          decode(std::move(decode)) {}
    WorkerView(const WorkerView&) = delete;

    // Seconds between the tokens of one more request, of so many tokens; stall_s: of prefill meanwhile, for
    // each of them.
    double gap_s(int64_t tokens, double stall_s) const;
    // Seconds of a step of those that decode there now; 0 without any.
    double step_s() const {
        size_t batch =
            load->decodes();  // most engines of a fleet for prefill have none: their model is not read
        if (batch == 0) return 0;
        return decode->predict(static_cast<double>(batch), static_cast<double>(load->context_tokens()));
    }
    // Seconds of a prefill that began now, with nothing to hide a fetch behind.
    double prefill_s(PrefillWork work) const {
        work.step_s = step_s();
        return prefill->predict(work);
    }
    bool has_room(int64_t tokens) const {
        return room_tokens == 0 || load->context_tokens() + tokens <= room_tokens;
    }
    // A request is sent here, and enters the load. predicted_s: of its prefill; 0: the model predicts it.
    // silent: neither the end of its prefill nor the beginning of its decode will be heard of; both are in
    // the load from now on.
    Dispatched dispatched(int64_t request, PrefillWork work, double predicted_s, double now_s, bool silent);

    const uint32_t place;                 // among all workers
    int64_t room_tokens;                  // what its KV cache holds; 0: not known
    bool obeys = false;                   // it computes what it is told not to fetch
    int64_t pending_handover = 0;         // requests that others prefill for it
    int64_t pending_handover_tokens = 0;  // of their prompts
    int64_t turn = -1;                    // when a policy last chose it, by the policy's own count
    const std::shared_ptr<WorkerLoad> load;
    const std::shared_ptr<const PrefillModel> prefill;
    const std::shared_ptr<const DecodeModel> decode;
};

// What is asked about a prompt.
struct Prompt {
    int64_t tokens = 0;
    int64_t pool = 0;  // leading tokens that the pool holds
    double now_s = 0;
    double ahead_s = 0;            // of the sender's other fetches
    double urgency = 1;            // what a second of its own time counts
    double marginal_delay = 0;     // what a second of work costs later requests, for each second before it
    double reuse_probability = 0;  // that a token which is driven out must be computed again
    double spare_s = 0;            // so much more than to compute a fetch may cost, to see what it does
    double stalled = 0;            // what a second counts in which one that decodes there gets no tokens
    // An engine that would keep those that decode there from their next token for longer, all that is in line
    // there computed first, or has no room for so many tokens, is no candidate.
    double gap_most_s = INFINITY;
    int64_t need_tokens = 0;
    const WorkerView* without = nullptr;  // is no candidate, unless it is the only one
    const WorkerView* last = nullptr;     // where its conversation was
    int64_t last_own = -1;                // what that holds of it; -1: as the others, by place
    double noise = 0;                     // by how much of its time predictions are wrong there
    double unseen_s = 0;  // prefill that other proxies have sent to these workers and not reported yet
};

enum class Reason : uint8_t { kOnly, kSession, kMatch, kTurn, kLeastTime, kSparesOthers, kDrawn };

struct Cheapest {
    size_t which = 0;  // of the candidates
    Reason reason = Reason::kOnly;
    bool fetches = false;
    int64_t own = 0;
    double cost = 0, ttft_s = 0, prefill_s = 0, transfer_s = 0;  // ttft: without a hand-over
    double lost_s = 0;                                           // by fetching rather than computing
    double gap_s = 0;                                            // between its tokens, if it answers, too
};

struct LeastGap {
    size_t which = 0;
    double gap_s = 0;
};

class Candidates {
   public:
    static constexpr double kEqualS = 0.001, kEqualGapS = 0.00005;  // what makes no difference

    explicit Candidates(std::vector<std::shared_ptr<WorkerView>> all) : all_(std::move(all)) {}

    size_t size() const { return all_.size(); }
    // The engine that is to compute the prompt; at an infinite cost when none may. own: tokens in an
    // worker's own cache, by its place; one behind the end has none.
    Cheapest cheapest(const Prompt& prompt, std::span<const uint32_t> own);
    // The engine that is to answer, of those with room for so many tokens, or of all when none has.
    LeastGap least_gap(int64_t tokens, int64_t need_tokens, double now_s) const;

   private:
    struct Weighed {
        double cost, ttft_s, prefill_s, transfer_s, lost_s;
        int64_t own;
        bool fetches;
    };
    Weighed weigh(const WorkerView& view, const Prompt& prompt, int64_t own) const;
    bool may(const WorkerView& view, const Prompt& prompt, double ttft_s) const;
    std::optional<size_t> draw(double unseen, double least, double chance);
    // Of two that are equal otherwise: the fewest requests, then the one that was chosen longest ago.
    bool goes_first(size_t one, size_t other) const;

    std::vector<std::shared_ptr<WorkerView>> all_;
    std::vector<Weighed> weighed_;  // of the last question: its memory is used again
    std::vector<size_t> near_;      // candidates that may be drawn; likewise
    uint64_t draws_ = 0;
};

}  // namespace moonpool
