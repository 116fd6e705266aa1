// The cost models of one engine, learnt online: what prefill, the hand-over and a decode step take.
//
//     prefill          =  base  +  token u  +  square (n^2 - r^2)  +  load own  +  fetch  +  d (step + steps
//     u)
//         n: tokens of the prompt; own: leading ones in the engine's own cache; pool: those behind them that
//         it fetches; r = own + pool: reused; u = n - r: computed; d: a decode step of the requests that
//         decode there meanwhile, 0 without any
//     fetch            =  latency + fetch_token pool + share ahead    of a request that need not wait
//                         hidden_token pool                           of one that waits, and is fetched
//                         meanwhile
//     hand-over        =  base + token n
//     between tokens   =  base + request batch + context ctx + stalls s
//         ctx: tokens in the KV cache of the batch; s: seconds of prefill there, by tokens of a request
//
// The form of the prefill term is the cost model of the Mooncake paper (FAST '25, section 2.2 of its cost
// model: a linear and a quadratic part of the tokens that are computed, and a linear one of those that are
// reused, which are loaded into the GPU's memory: load, of fetched ones within latency and fetch_token).
// Latency and fetch_token are this engine's towards the pool; hidden_token is what cannot be hidden behind
// the prompts before it; ahead: seconds of other fetches that the sender has before it, share: how much of
// them is felt. An engine that serves requests whole computes a prompt in chunks, and a step has a chunk and
// a token of each request that decodes: steps is one by the tokens of a chunk, step one for what the last
// chunk lacks of a whole one; both are 0 where decode stands still meanwhile. Priors are of a mid-sized model
// on one GPU and wide, so that a few tens of requests replace them.
//
// Seconds and tokens everywhere. A regression learns in thousands and millions of tokens, so that its
// coefficients are of one order; the costs below are for each token. Pure: no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include "conductor/pooled_regression.hpp"

namespace moonpool {

struct PrefillCosts {
    double base_s, token_s, square_s, load_token_s;
    double fetch_latency_s, fetch_token_s, fetch_hidden_token_s, fetch_share;
    double step, step_token;

    // Of the tokens from `reused` to `tokens`, which attend to all before them.
    double compute_s(double reused, double tokens) const {
        return token_s * (tokens - reused) + square_s * (tokens * tokens - reused * reused);
    }
    // With nothing to hide behind.
    double fetch_s(double pool, double ahead_s) const {
        return fetch_latency_s + fetch_token_s * pool + fetch_share * ahead_s;
    }
    double hidden_fetch_s(double pool) const { return fetch_hidden_token_s * pool; }
    // Seconds of decode in the steps that compute so many tokens; step_s: of one decode step.
    double decode_steps_s(double step_s, double computed) const {
        return step_s * (step + step_token * computed);
    }
};

// A prompt as prefill sees it.
struct PrefillWork {
    int64_t tokens = 0, own = 0, pool = 0;
    double ahead_s = 0;   // of the sender's other fetches
    bool queued = false;  // others are computed before
    double step_s = 0;    // of a decode step there meanwhile (DecodeModel::step_s)
};

class PrefillModel {
   public:
    // The places of the coefficients.
    enum Term : size_t {
        kBase,
        kToken,
        kSquare,
        kLoad,
        kFetchLatency,
        kFetchToken,
        kFetchHidden,
        kFetchShare,
        kStep,
        kStepToken,
        kTerms
    };
    static constexpr double kThousand = 1e-3, kMillion = 1e-6;  // the scales of the features

    PrefillModel();
    // Inline: a decision asks a thousand of them, and needs but some of the costs.
    PrefillCosts costs() const {
        PooledRegression::Coefficients mixed;
        const std::span<const double> by = regression_.coefficients(mixed);
        return {.base_s = by[kBase],
                .token_s = by[kToken] * kThousand,
                .square_s = by[kSquare] * kMillion,
                .load_token_s = by[kLoad] * kThousand,
                .fetch_latency_s = by[kFetchLatency],
                .fetch_token_s = by[kFetchToken] * kThousand,
                .fetch_hidden_token_s = by[kFetchHidden] * kThousand,
                .fetch_share = by[kFetchShare],
                .step = by[kStep],
                .step_token = by[kStepToken] * kThousand};
    }
    // Seconds before the first token, without waiting for its turn.
    double predict(const PrefillWork& work) const;
    // How far off that may be for what has not been learnt yet (Regression::doubt).
    double doubt_s(const PrefillWork& work) const;
    // Of so many tokens with nothing before them and nothing to hide behind.
    double transfer_s(int64_t pool) const;
    // The error of the prediction before; nothing for a sample that changes nothing (Regression::observe).
    std::optional<double> observe(const PrefillWork& work, double seconds);
    PooledRegression& regression() { return regression_; }

   private:
    PooledRegression regression_;  // by value: a decision reads it of every worker
};

// From the end of prefill to the decode engine's first token.
class HandoverModel {
   public:
    HandoverModel();
    double predict(int64_t tokens) const;
    std::optional<double> observe(int64_t tokens, double seconds);
    PooledRegression& regression() { return regression_; }

   private:
    PooledRegression regression_;
};

// Between two tokens of a request that decodes in a batch.
class DecodeModel {
   public:
    DecodeModel();
    // batch: requests that decode together, this one included; context_tokens: of all of them.
    // stall_s: seconds of prefill there for each of its tokens.
    double predict(double batch, double context_tokens, double stall_s = 0) const;
    // Seconds of a step of those that decode, averages over some time; 0 without any.
    double step_s(double batch, double context_tokens) const {
        return batch > 0 ? std::min(batch, 1.0) * predict(std::max(batch, 1.0), context_tokens) : 0.0;
    }
    std::optional<double> observe(double batch, double context_tokens, double seconds, double stall_s = 0);
    PooledRegression& regression() { return regression_; }

   private:
    PooledRegression regression_;
};

}  // namespace moonpool
