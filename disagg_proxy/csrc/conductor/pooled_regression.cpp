#include "conductor/pooled_regression.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moonpool {

namespace {

// Chosen, not fitted: the tests of pooled_regression say what follows from them.
constexpr double kKindMemory = 2000;  // samples of all engines of a kind: eight times an engine's own memory
constexpr int kRecent = 16;        // samples: the weight of the last one in an engine's mean errors is 1/16
constexpr int kComparedMin = 8;    // samples: with fewer the kind predicts
constexpr double kErrorMax = 4.0;  // relative: a larger error counts as this one
// Mean square of the kind's errors over that of the engine's own: from the first on the engine's own
// regression counts, from the second on it alone does (errors 1.2 and 2 times as large).
constexpr double kBetter = 1.5, kMuchBetter = 4.0;
constexpr double kFollows = 0.5;  // share of its own, from which on an engine does not teach its kind
constexpr double kDiffers =
    2.0;  // times the prediction, or as small a part of it: a sample that is not like it
constexpr uint64_t kFirst = 64;  // samples of a kind: until then each teaches it
constexpr double kLike =
    0.75;  // of an engine's last samples, like its kind: then the engine counts as like it
constexpr int kPassedOverMax = 32;  // samples of engines in turn, none like the kind: then all have changed

bool is_near(const Regression& regression, double predicted, double y) {
    double ratio = regression.scale(y) / regression.scale(predicted);
    return ratio <= kDiffers && ratio >= 1 / kDiffers;
}

}  // namespace

PooledRegression::PooledRegression(std::span<const double> prior, std::span<const double> spread,
                                   double floor)
    : kind_(std::make_shared<Kind>(Kind{Regression(prior, spread, floor, kKindMemory)})),
      own_(prior, spread, floor) {}

std::span<const double> PooledRegression::mix_coefficients(Coefficients& mixed) const {
    std::span<const double> own = own_.coefficients(), kind = kind_->regression.coefficients();
    for (size_t i = 0; i < own.size(); ++i) mixed[i] = kind[i] + share_ * (own[i] - kind[i]);
    return {mixed.data(), own.size()};
}

double PooledRegression::predict(std::span<const double> features) const {
    double kind = kind_->regression.predict(features);
    return share_ == 0 ? kind : kind + share_ * (own_.predict(features) - kind);
}

double PooledRegression::doubt(std::span<const double> features) const {
    double kind = kind_->regression.doubt(features);
    return share_ == 0 ? kind : kind + share_ * (own_.doubt(features) - kind);
}

std::optional<double> PooledRegression::observe(std::span<const double> features, double y) {
    double predicted = predict(features), kind = kind_->regression.predict(features);
    double own_predicted = own_.predict(features);
    uint64_t opened = own_.opened();
    std::optional<double> own_error = own_.observe(features, y);
    if (!own_error) return std::nullopt;  // no numbers, or absurd: it says nothing of the kind, either
    if (own_.opened() != opened) {
        // It has changed: its errors until now say nothing of what it learns now, and its kind has not
        // learnt.
        compared_ = 0;
        if (!is_near(kind_->regression, kind, y)) share_ = 1;
    } else {
        update_share(*own_error, y - kind, own_.scale(kind));
    }
    bool certain = likeness_ > kLike && is_near(own_, own_predicted, y);
    if (is_like_kind(features, kind, y)) {
        kind_->passed_over = 0;
        kind_->passed_over_last = nullptr;
        likeness_ += (1 - likeness_) / kRecent;
        kind_->regression.observe(features, y);
    } else {
        likeness_ -= likeness_ / kRecent;
        // Of one engine in a row one counts: what it does alone, its kind need not.
        if (std::exchange(kind_->passed_over_last, this) != this) ++kind_->passed_over;
        // The engine is like its kind else, and its own regression predicted this: its kind is wrong here, as
        // it learnt something rare from an outlier. Or all of the kind have changed.
        bool all_differ = kind_->passed_over > kPassedOverMax || kind_.use_count() == 1;
        if (all_differ || certain) kind_->regression.observe(features, y, certain);
    }
    return y - predicted;
}

void PooledRegression::join_kind(const PooledRegression& other) {
    if (kind_ != other.kind_) set_kind(other.kind_);
}

void PooledRegression::leave_kind() {
    if (kind_.use_count() == 1) return;  // it is alone already
    Coefficients mixed;
    auto kind = std::make_shared<Kind>(*kind_);
    kind->regression.restart(coefficients(mixed));
    kind->passed_over = 0;
    kind->passed_over_last = nullptr;
    set_kind(std::move(kind));
}

// Its errors until now say nothing of what another kind predicts.
void PooledRegression::set_kind(std::shared_ptr<Kind> kind) {
    kind_ = std::move(kind);
    share_ = likeness_ = 0;
    compared_ = 0;
}

// By what the engine was and by this sample, or as the kind knows too little of such work to tell.
bool PooledRegression::is_like_kind(std::span<const double> features, double predicted, double y) const {
    const Regression& kind = kind_->regression;
    if (share_ < kFollows && (kind.samples() < kFirst || is_near(kind, predicted, y))) return true;
    return kind.allows(features, y);
}

void PooledRegression::update_share(double own_error, double kind_error, double expected) {
    auto square = [&](double error) {
        double relative = std::min(std::abs(error) / expected, kErrorMax);
        return relative * relative;
    };
    compared_ = std::min(compared_ + 1, kRecent);
    own_squares_ += (square(own_error) - own_squares_) / compared_;
    kind_squares_ += (square(kind_error) - kind_squares_) / compared_;
    if (compared_ < kComparedMin) return;
    double ratio = kind_squares_ / std::max(own_squares_, 1e-12);
    share_ = std::clamp((ratio - kBetter) / (kMuchBetter - kBetter), 0.0, 1.0);
}

std::string PooledRegression::check_integrity() const {
    if (!(share_ >= 0 && share_ <= 1)) return "the share of an engine's own regression is out of bounds";
    std::string wrong = own_.check_integrity();
    return wrong.empty() ? kind_->regression.check_integrity() : wrong;
}

}  // namespace moonpool
