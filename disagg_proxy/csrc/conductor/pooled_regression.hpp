// PooledRegression: what one engine's work takes, learnt from its own samples and from those of its kind.
//
// Each engine has a regression of its own, and engines of one kind share another. The engine's prediction is
// that of its kind, unless its own has been clearly better on its own last samples; then its own counts for
// so much more. So equal engines, whose own regressions differ by the chance of their samples, are predicted
// alike, and one that is slower, or slows down, is predicted by itself after a few tens of samples. (It is
// the idea of partial pooling, as in Gelman and Hill, "Data Analysis Using Regression", ch. 12, with a weight
// by errors as in predictions by several experts.)
//
// A sample teaches the kind while the engine is predicted by it, and where it is within what the kind does
// not know yet: an engine that differs does not mislead the others, and what is rare is learnt. Where all of
// a kind differ from what the kind has learnt, it begins to learn from them again. Pure: no clock, no lock;
// all engines of a kind are used under one lock.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>

#include "conductor/regression.hpp"

namespace moonpool {

class PooledRegression {
   public:
    using Coefficients = std::array<double, Regression::kCoefficientsMax>;

    // As of Regression. The kind is a new one, of this engine alone.
    PooledRegression(std::span<const double> prior, std::span<const double> spread, double floor);

    // Coefficients of the prediction. mixed: memory for them, which is used where both regressions count.
    std::span<const double> coefficients(Coefficients& mixed) const {
        return share_ == 0 ? kind_->regression.coefficients() : mix_coefficients(mixed);
    }
    double predict(std::span<const double> features) const;
    // How far off the prediction may be, as Regression::doubt.
    double doubt(std::span<const double> features) const;
    // Learns from one sample. Returns the error of the prediction before, y - predicted; nothing for a sample
    // that changes nothing.
    std::optional<double> observe(std::span<const double> features, double y);

    // From now on it is of the other's kind. What it has learnt itself is kept.
    void join_kind(const PooledRegression& other);
    // From now on it is of a kind of its own, which predicts as this engine was predicted, and is as open to
    // samples as at the beginning: what its former kind knows for certain is not known of this one.
    void leave_kind();
    // Of a kind without samples: it begins with these coefficients, and as little known. False: it has
    // samples, or these are no numbers.
    bool start(std::span<const double> coefficients) { return kind_->regression.start(coefficients); }

    // How much of a prediction is the engine's own: 0 to 1.
    double share() const { return share_; }
    const Regression& own() const { return own_; }
    const Regression& kind() const { return kind_->regression; }
    // The same, which lasts for as long as it is held.
    std::shared_ptr<const Regression> shared_kind() const { return {kind_, &kind_->regression}; }
    // The first invariant that does not hold, in words; "" when all do.
    std::string check_integrity() const;

   private:
    struct Kind {
        Regression regression;
        // Since the last sample of an engine that is like it: how many were not, those of one engine in a row
        // counted once, and whose the last of them was.
        int passed_over = 0;
        const PooledRegression* passed_over_last = nullptr;
    };

    std::span<const double> mix_coefficients(Coefficients& mixed) const;
    bool is_like_kind(std::span<const double> features, double predicted, double y) const;
    void set_kind(std::shared_ptr<Kind> kind);
    void update_share(double own_error, double kind_error, double expected);

    // These two first: all that a decision among many engines reads of one that is like its kind.
    std::shared_ptr<Kind> kind_;
    double share_ = 0;
    Regression own_;
    double own_squares_ = 0, kind_squares_ = 0;  // means of squares of the last errors, relative
    int compared_ = 0;                           // samples in these means, up to kRecent
    double likeness_ = 0;                        // the part of its last samples that were like its kind
};

}  // namespace moonpool
