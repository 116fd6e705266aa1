#include "conductor/cost_model.hpp"

#include <algorithm>
#include <array>

namespace moonpool {

namespace {

using enum PrefillModel::Term;
constexpr double kThousand = PrefillModel::kThousand, kMillion = PrefillModel::kMillion;

// Priors, and how far off each may be.
constexpr std::array<double, PrefillModel::kTerms> kPrefillPrior{0.02,  0.1,   0.001, 0.001, 0.005,
                                                                 0.002, 0.001, 1.0,   0,     0};
constexpr std::array<double, PrefillModel::kTerms> kPrefillSpread{0.1, 0.3, 0.01, 0.02, 0.1,
                                                                  0.3, 0.3, 1.0,  0.5,  1.0};

enum HandoverTerm : size_t { kHandoverBase, kHandoverToken, kHandoverTerms };
constexpr std::array<double, kHandoverTerms> kHandoverPrior{0.01, 0.01}, kHandoverSpread{0.05, 0.05};

enum DecodeTerm : size_t { kDecodeBase, kDecodeRequest, kDecodeContext, kDecodeStall, kDecodeTerms };
constexpr std::array<double, kDecodeTerms> kDecodePrior{0.01, 0.0003, 0.00002, 1.0};
constexpr std::array<double, kDecodeTerms> kDecodeSpread{0.05, 0.002, 0.0005, 0.5};

constexpr double kFloorS = 0.005, kDecodeFloorS = 0.002;

std::array<double, PrefillModel::kTerms> features_of(const PrefillWork& work) {
    auto tokens = static_cast<double>(work.tokens),
         own = static_cast<double>(std::min(work.own, work.tokens));
    auto reused = static_cast<double>(std::min(work.own + work.pool, work.tokens));
    double fetched = static_cast<double>(std::min(work.pool, work.tokens)) * kThousand;
    std::array<double, PrefillModel::kTerms> by{};
    by[kBase] = 1;
    by[kToken] = (tokens - reused) * kThousand;
    by[kSquare] = (tokens * tokens - reused * reused) * kMillion;
    by[kLoad] = own * kThousand;
    if (fetched != 0 && work.queued) by[kFetchHidden] = fetched;
    if (fetched != 0 && !work.queued) {
        by[kFetchLatency] = 1;
        by[kFetchToken] = fetched;
        by[kFetchShare] = work.ahead_s;
    }
    by[kStep] = work.step_s;
    by[kStepToken] = work.step_s * by[kToken];
    return by;
}

}  // namespace

PrefillModel::PrefillModel() : regression_(kPrefillPrior, kPrefillSpread, kFloorS) {}

double PrefillModel::predict(const PrefillWork& work) const { return regression_.predict(features_of(work)); }

double PrefillModel::doubt_s(const PrefillWork& work) const { return regression_.doubt(features_of(work)); }

double PrefillModel::transfer_s(int64_t pool) const {
    PrefillCosts by = costs();
    double token_s = std::max(by.fetch_token_s, by.fetch_hidden_token_s);
    return pool == 0 ? 0.0 : by.fetch_latency_s + token_s * static_cast<double>(pool);
}

std::optional<double> PrefillModel::observe(const PrefillWork& work, double seconds) {
    return regression_.observe(features_of(work), seconds);
}

HandoverModel::HandoverModel() : regression_(kHandoverPrior, kHandoverSpread, kFloorS) {}

double HandoverModel::predict(int64_t tokens) const {
    return regression_.predict(std::array{1.0, static_cast<double>(tokens) * kThousand});
}

std::optional<double> HandoverModel::observe(int64_t tokens, double seconds) {
    return regression_.observe(std::array{1.0, static_cast<double>(tokens) * kThousand}, seconds);
}

DecodeModel::DecodeModel() : regression_(kDecodePrior, kDecodeSpread, kDecodeFloorS) {}

double DecodeModel::predict(double batch, double context_tokens, double stall_s) const {
    return regression_.predict(std::array{1.0, batch, context_tokens * kThousand, stall_s});
}

std::optional<double> DecodeModel::observe(double batch, double context_tokens, double seconds,
                                           double stall_s) {
    return regression_.observe(std::array{1.0, batch, context_tokens * kThousand, stall_s}, seconds);
}

}  // namespace moonpool
