#include "conductor/regression.hpp"

#include <algorithm>
#include <cmath>

namespace moonpool {

namespace {

constexpr double kErrorShare = 0.1;     // a sample is expected to lie within this share of its prediction
constexpr double kOutlierErrors = 3.0;  // an error counts as no more than so many expected ones
constexpr double kAbsurd = 5.0;         // times the prediction, or as small a part of it, and times the bound
constexpr double kChanged = 2.0;        // times the prediction, or as small a part of it, is the median

bool is_number(double value) { return value >= 0 && value < INFINITY; }  // NaN is in no range

double dot(std::span<const double> one, std::span<const double> other) {
    double sum = 0;
    for (size_t i = 0; i < one.size(); ++i) sum += one[i] * other[i];
    return sum;
}

}  // namespace

Regression::Regression(std::span<const double> prior, std::span<const double> spread, double floor,
                       double memory)
    : size_(prior.size()), covariance_(size_), floor_(floor), fades_(1 / (1 - 1 / memory)) {
    for (size_t i = 0; i < size_; ++i) {
        coefficients_[i] = prior[i];
        most_[i] = spread[i] * spread[i];
    }
    open();
    opened_ = 0;
}

double Regression::predict(std::span<const double> features) const { return dot(coefficients(), features); }

double Regression::doubt(std::span<const double> features) const {
    Row reach = reach_of(features);
    return std::sqrt(std::max(dot({reach.data(), size_}, features), 0.0));
}

bool Regression::allows(std::span<const double> features, double y) const {
    double predicted = predict(features);
    return std::abs(y - predicted) <=
           kOutlierErrors * std::sqrt(variance_of(reach_of(features), features, predicted));
}

Regression::Row Regression::reach_of(std::span<const double> features) const {
    Row reach{};
    for (size_t i = 0; i < size_; ++i) reach[i] = dot({covariance_[i].data(), size_}, features);
    return reach;
}

double Regression::variance_of(const Row& reach, std::span<const double> features, double predicted) const {
    double expected = kErrorShare * scale(predicted);
    return dot({reach.data(), size_}, features) + expected * expected;
}

bool Regression::start(std::span<const double> coefficients) {
    if (samples_ != 0 || !std::all_of(coefficients.begin(), coefficients.end(), is_number)) return false;
    std::copy(coefficients.begin(), coefficients.end(), coefficients_.begin());
    return true;
}

void Regression::restart(std::span<const double> coefficients) {
    std::copy(coefficients.begin(), coefficients.end(), coefficients_.begin());
    open();
    opened_ = samples_ = odd_ = refused_ = 0;
}

std::optional<double> Regression::observe(std::span<const double> features, double y, bool certain) {
    bool all_numbers = is_number(y) && std::all_of(features.begin(), features.end(), is_number);
    bool any = std::any_of(features.begin(), features.end(), [](double value) { return value != 0; });
    if (!all_numbers || !any) {
        ++refused_;
        return std::nullopt;
    }
    double predicted = predict(features), error = y - predicted;
    bool believed = is_believed(predicted, y);
    Row reach = reach_of(features);
    double variance = variance_of(reach, features, predicted);
    double bound_of_error = kOutlierErrors * std::sqrt(variance);
    if (certain && std::abs(error) > bound_of_error) {
        double wanted = error * error / (kOutlierErrors * kOutlierErrors);
        open_along(reach, features, variance, wanted);
        bound_of_error = std::abs(error);
    }
    if (!believed && std::abs(error) > kAbsurd * bound_of_error) {
        ++odd_;
        return std::nullopt;
    }
    // It moves as far as the bound does, and leaves as much to be learnt.
    if (std::abs(error) > bound_of_error) variance *= std::abs(error) / bound_of_error;
    double step = error / variance;
    Row moved{};
    for (size_t i = 0; i < size_; ++i) moved[i] = coefficients_[i] + reach[i] * step;
    coefficients_ = within(moved);
    for (size_t i = 0; i < size_; ++i) {
        double gain = reach[i] / variance;
        for (size_t k = 0; k <= i; ++k) {
            covariance_[i][k] = covariance_[k][i] = (covariance_[i][k] - gain * reach[k]) * fades_;
        }
    }
    bound();
    ++samples_;
    return error;
}

// These coefficients with none below 0: one after the other is held there, and what goes with it moves as far
// as it is known to.
Regression::Row Regression::within(const Row& moved) const {
    Row values = moved;
    auto covariance = covariance_;
    std::array<bool, kCoefficientsMax> held{};
    while (true) {
        auto place =
            static_cast<size_t>(std::min_element(values.begin(), values.begin() + size_) - values.begin());
        double least = values[place];
        if (!(least < 0)) return values;
        Row row = covariance[place], gains{};
        for (size_t i = 0; i < size_; ++i) {
            if (!held[i] && row[place] != 0) gains[i] = row[i] / row[place];
            values[i] -= least * gains[i];
        }
        values[place] = 0;
        held[place] = true;
        for (size_t i = 0; i < size_; ++i) {
            for (size_t k = 0; k < size_; ++k) covariance[i][k] -= gains[i] * row[k];
            if (held[i]) values[i] = std::max(values[i], 0.0);
        }
    }
}

// Whether it is not absurd. Opens again what was learnt where too many are like it.
bool Regression::is_believed(double predicted, double y) {
    double ratio = std::max(y, floor_) / std::max(predicted, floor_);
    recent_[seen_++ % kRecent] = ratio;
    if (seen_ >= kRecent) {
        auto ordered = recent_;
        std::nth_element(ordered.begin(), ordered.begin() + kRecent / 2, ordered.end());
        double median = ordered[kRecent / 2];
        if (median < 1 / kChanged || median > kChanged) open();
    }
    return (ratio >= 1 / kAbsurd && ratio <= kAbsurd) || seen_ < kRecent;
}

// As much less is known of such work that the variance is this one.
void Regression::open_along(Row& reach, std::span<const double> features, double& variance, double wanted) {
    double known = dot({reach.data(), size_}, features);
    if (!(known > 0)) return;
    double grows = 1 + (wanted - variance) / known;
    for (size_t i = 0; i < size_; ++i) {
        for (size_t k = 0; k <= i; ++k) {
            covariance_[i][k] += (grows - 1) / known * reach[i] * reach[k];
            covariance_[k][i] = covariance_[i][k];
        }
    }
    for (size_t i = 0; i < size_; ++i) reach[i] *= grows;
    variance = wanted;
}

// As little is known as the prior says.
void Regression::open() {
    ++opened_;
    seen_ = 0;
    std::fill(covariance_.begin(), covariance_.end(), Row{});
    for (size_t i = 0; i < size_; ++i) covariance_[i][i] = most_[i];
}

// Without samples along a direction its variance grows; no further than the prior's.
void Regression::bound() {
    for (size_t i = 0; i < size_; ++i) {
        if (covariance_[i][i] <= most_[i]) continue;
        double scale = std::sqrt(most_[i] / covariance_[i][i]);
        for (size_t k = 0; k < size_; ++k) {
            covariance_[i][k] *= scale;
            covariance_[k][i] = covariance_[i][k];
        }
        covariance_[i][i] *= scale;
    }
}

std::string Regression::check_integrity() const {
    for (size_t i = 0; i < size_; ++i) {
        if (!is_number(coefficients_[i])) return "a coefficient is out of bounds";
        double variance = covariance_[i][i];
        if (!(variance >= 0 && variance <= most_[i] * 1.001)) return "a variance is out of bounds";
        for (size_t k = 0; k < i; ++k) {
            if (covariance_[i][k] != covariance_[k][i]) return "the covariance is not symmetric";
        }
    }
    return "";
}

}  // namespace moonpool
