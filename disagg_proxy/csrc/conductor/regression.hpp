// Regression: least squares that learns while it is used: a linear model with non-negative coefficients, a
// prior that fades with evidence, slow forgetting, and two bounds on what odd samples may do.
//
// The recursion is least squares with exponential forgetting (Plackett 1950, "Some theorems in least
// squares"; Ljung, "System Identification", ch. 11). Samples far from the prediction count as if they were at
// a bound, as in Huber's loss (Huber 1964), and those that are absurd count nothing: an engine that stood
// still, a clock that jumped. What has really changed moves the median of the last samples; when that is
// twice the prediction, or half of it, what was learnt is open again as at the beginning. Pure: no clock, no
// lock.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace moonpool {

class Regression {
   public:
    static constexpr size_t kCoefficientsMax = 10;
    static constexpr double kMemory = 250;

    // y = sum of coefficient * feature, each coefficient at least 0. prior: the coefficients before any
    // sample; spread: how far off each may be (standard deviation), as many; floor: the smallest scale of y
    // that matters, in y's unit. memory: a sample that is so many samples old counts for a third (1/e) of the
    // last.
    Regression(std::span<const double> prior, std::span<const double> spread, double floor,
               double memory = kMemory);

    std::span<const double> coefficients() const { return {coefficients_.data(), size_}; }
    double predict(std::span<const double> features) const;
    // Learns from one sample. Returns the error of the prediction before, y - predicted; nothing for a sample
    // that changes nothing: no set of finite, non-negative numbers, or absurd.
    // certain: it is no outlier, by what others know, so what was learnt of such work is open again if it is
    // far off.
    std::optional<double> observe(std::span<const double> features, double y, bool certain = false);

    // How far off the prediction may be for what is not known of the coefficients (standard deviation): wide
    // before the first samples of such work, and small later. Errors of single samples are not in it.
    double doubt(std::span<const double> features) const;
    // Whether the sample lies within what is uncertain of its prediction.
    bool allows(std::span<const double> features, double y) const;

    // Begins with these coefficients in the place of the prior's, and as little known: a first guess from
    // others. False: there was a sample, or these are no numbers, and nothing changes.
    bool start(std::span<const double> coefficients);

    // Begins anew with these coefficients, each as little known as at the beginning, and without samples.
    void restart(std::span<const double> coefficients);

    // The scale of errors at this prediction: the floor for small ones.
    double scale(double predicted) const { return std::max(predicted, floor_); }
    // How often it forgot what it had learnt, since it was wrong by far.
    uint64_t opened() const { return opened_; }
    uint64_t samples() const { return samples_; }
    uint64_t odd() const { return odd_; }          // were absurd
    uint64_t refused() const { return refused_; }  // were no numbers
    // The first invariant that does not hold, in words; "" when all do.
    std::string check_integrity() const;

   private:
    static constexpr size_t kRecent = 15;  // samples, of which the median is taken
    using Row = std::array<double, kCoefficientsMax>;

    // Of the covariance and these features.
    Row reach_of(std::span<const double> features) const;
    // How far from this prediction a sample may be expected: wide while little is known, and narrow later.
    double variance_of(const Row& reach, std::span<const double> features, double predicted) const;
    Row within(const Row& moved) const;
    bool is_believed(double predicted, double y);
    void open();
    void open_along(Row& reach, std::span<const double> features, double& variance, double wanted);
    void bound();

    size_t size_;
    Row coefficients_{}, most_{};           // most: the variance of the prior
    std::vector<Row> covariance_;           // a row for each coefficient; apart, as decisions do not read it
    double floor_, fades_;                  // fades: what the covariance grows by with each sample
    std::array<double, kRecent> recent_{};  // observed over predicted, in turn
    size_t seen_ = 0;                       // since it was open
    uint64_t opened_ = 0, samples_ = 0, odd_ = 0, refused_ = 0;
};

}  // namespace moonpool
