// Engines of one kind that learn together: equal ones are predicted alike, and one that differs by itself.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "../random.hpp"
#include "conductor/pooled_regression.hpp"

namespace moonpool::testing {
namespace {

constexpr std::array<double, 2> kPrior{0.05, 1e-4}, kSpread{0.05, 1e-4};

// Engines of one kind whose work takes 0.02 + 3e-5 n seconds, times a factor of each engine, within 10 %.
struct Fleet {
    explicit Fleet(size_t engines) : factor(engines, 1.0) {
        for (size_t i = 0; i < engines; ++i) {
            models.emplace_back(kPrior, kSpread, 0.01);
            if (i != 0) models[i].join_kind(models[0]);
        }
    }
    static std::array<double, 2> work(double tokens) { return {1, tokens}; }
    double seconds(size_t engine, double tokens) const { return factor[engine] * (0.02 + 3e-5 * tokens); }
    void observe(size_t engine) {
        double tokens = static_cast<double>(random.between(100, 8000));
        double noise = 0.9 + 0.0002 * static_cast<double>(random.below(1001));
        models[engine].observe(work(tokens), noise * seconds(engine, tokens));
    }
    void observe_all(int samples) {
        for (int n = 0; n < samples; ++n) {
            for (size_t i = 0; i < models.size(); ++i) observe(i);
        }
    }
    // Of a prediction for 4,000 tokens, relative.
    double error(size_t engine) const {
        double right = seconds(engine, 4000);
        return std::abs(models[engine].predict(work(4000)) - right) / right;
    }

    std::vector<PooledRegression> models;
    std::vector<double> factor;
    Random random{2401};
};

TEST_CASE("pooled regression: equal engines are predicted alike, however few samples one has") {
    Fleet fleet(8);
    for (int n = 0; n < 400; ++n) fleet.observe(n % 7);
    for (const PooledRegression& model : fleet.models) {
        CHECK(model.share() <= 0.5);  // by chance alone
        CHECK(model.check_integrity() == "");
    }
    CHECK(fleet.models[7].own().samples() == 0);
    for (size_t i = 0; i < 8; ++i) CHECK(fleet.error(i) < 0.10);
}

TEST_CASE("pooled regression: an engine slower from its start is predicted by itself, and misleads none") {
    for (double factor : {4.0, 0.25}) {
        CAPTURE(factor);
        Fleet fleet(4);
        fleet.factor[3] = factor;
        fleet.observe_all(60);
        CHECK(fleet.models[3].share() > 0.9);
        for (size_t i = 0; i < 4; ++i) CHECK(fleet.error(i) < 0.25);
    }
}

TEST_CASE("pooled regression: an engine that slows down is predicted by itself after some tens of samples") {
    Fleet fleet(4);
    fleet.observe_all(100);
    fleet.factor[2] = 4;
    for (int n = 0; n < 40; ++n) fleet.observe(2);
    CHECK(fleet.error(2) < 0.25);
    CHECK(fleet.error(0) < 0.10);
    fleet.factor[2] = 1;  // and recovers
    for (int n = 0; n < 80; ++n) fleet.observe(2);
    CHECK(fleet.error(2) < 0.25);
}

TEST_CASE(
    "pooled regression: an engine that slows down is predicted by itself when most of its last samples say "
    "so") {
    Fleet fleet(4);
    fleet.observe_all(100);
    fleet.factor[2] = 4;
    for (int n = 0; n < 8; ++n) {
        CHECK(fleet.models[2].share() < 0.5);
        fleet.observe(2);
    }
    CHECK(fleet.models[2].share() == 1);
    CHECK(fleet.error(2) < 0.5);
    fleet.observe(2);  // it stays so until its errors and its kind's can be compared
    CHECK(fleet.models[2].share() == 1);
    for (int n = 0; n < 30; ++n) fleet.observe(2);
    CHECK(fleet.models[2].share() == 1);
}

TEST_CASE("pooled regression: what an engine learnt as another one does not count when it opens") {
    Fleet fleet(3);
    fleet.observe_all(200);
    fleet.models.emplace_back(kPrior, kSpread, 0.01);
    fleet.factor.push_back(4);
    for (int n = 0; n < 60; ++n) fleet.observe(3);
    fleet.factor[3] = 1;  // it was started again with a smaller model
    fleet.models[3].join_kind(fleet.models[0]);
    for (int n = 0; n < 30; ++n) {
        fleet.observe(3);
        CHECK(fleet.models[3].share() < 0.5);
    }
    CHECK(fleet.models[3].own().opened() > 0);
}

TEST_CASE("pooled regression: an engine that differs does not teach its kind while it has all the work") {
    Fleet fleet(4);
    fleet.observe_all(100);
    fleet.factor[2] = 3;
    for (int n = 0; n < 400; ++n) fleet.observe(2);
    CHECK(fleet.error(2) < 0.25);
    CHECK(fleet.error(0) < 0.10);
}

TEST_CASE("pooled regression: what is no number does not open the kind to an engine that differs") {
    Fleet fleet(4);
    fleet.observe_all(100);
    fleet.factor[2] = 3;
    for (int n = 0; n < 30; ++n) fleet.observe(2);
    for (int n = 0; n < 200; ++n) {
        for (size_t i : {0, 1}) {
            fleet.models[i].observe(Fleet::work(1000), n % 2 == 0 ? std::nan("") : -1.0);
        }
        fleet.observe(2);
    }
    CHECK(fleet.error(0) < 0.10);
    CHECK(fleet.error(2) < 0.25);
}

TEST_CASE("pooled regression: an engine that is alone in its kind teaches it whatever it does") {
    Fleet fleet(1);
    fleet.observe_all(200);
    fleet.factor[0] = 4;
    fleet.observe_all(60);
    double kind = fleet.models[0].kind().predict(Fleet::work(4000));
    CHECK(std::abs(kind / fleet.seconds(0, 4000) - 1) < 0.25);
}

TEST_CASE("pooled regression: where all of a kind change, the kind learns anew") {
    Fleet fleet(4);
    fleet.observe_all(200);
    for (double& factor : fleet.factor) factor = 3;
    fleet.observe_all(120);
    for (size_t i = 0; i < 4; ++i) CHECK(fleet.error(i) < 0.25);
    double kind = fleet.models[0].kind().predict(Fleet::work(4000));
    CHECK(std::abs(kind / fleet.seconds(0, 4000) - 1) < 0.25);
}

TEST_CASE("pooled regression: what is no number teaches neither, and a new kind begins as the last was") {
    Fleet fleet(2);
    fleet.observe_all(50);
    double before = fleet.models[0].predict(Fleet::work(1000));
    for (double wrong : {std::nan(""), -1.0, std::numeric_limits<double>::infinity()}) {
        CHECK_FALSE(fleet.models[0].observe(Fleet::work(1000), wrong));
        CHECK_FALSE(fleet.models[0].observe(std::array<double, 2>{1, wrong}, 1.0));
    }
    CHECK(fleet.models[0].predict(Fleet::work(1000)) == before);
    double as_before = fleet.models[1].predict(Fleet::work(1000));
    fleet.models[1].leave_kind();
    CHECK(&fleet.models[1].kind() != &fleet.models[0].kind());
    CHECK(fleet.models[1].predict(Fleet::work(1000)) == as_before);
    CHECK(fleet.models[1].kind().samples() == 0);
    uint64_t samples = fleet.models[0].kind().samples();
    fleet.observe(1);
    CHECK(fleet.models[0].kind().samples() == samples);
    PooledRegression fresh(kPrior, kSpread, 0.01);
    CHECK(fresh.start(std::array<double, 2>{0.1, 1e-3}));
    CHECK(fresh.predict(Fleet::work(100)) == doctest::Approx(0.2));
    CHECK_FALSE(fleet.models[0].start(std::array<double, 2>{0.1, 1e-3}));
}

TEST_CASE("pooled regression: a kind that turns out to be another learns as fast as a new one") {
    for (bool learnt : {false, true}) {
        CAPTURE(learnt);
        Fleet fleet(4);
        for (int n = 0; n < 300; ++n) fleet.observe(n % 3);
        fleet.factor[3] = 6;
        for (int n = 0; learnt && n < 40; ++n) fleet.observe(3);
        double before = fleet.models[3].predict(Fleet::work(4000));
        fleet.models[3].leave_kind();
        CHECK(fleet.models[3].predict(Fleet::work(4000)) == doctest::Approx(before));
        CHECK(fleet.models[3].share() == 0);
        fleet.models.emplace_back(kPrior, kSpread, 0.01);  // the second engine of this kind
        fleet.factor.push_back(6);
        fleet.models[4].join_kind(fleet.models[3]);
        for (int n = 0; n < 15; ++n) fleet.observe(3);
        CHECK(fleet.error(4) < 0.25);
        CHECK(fleet.error(0) < 0.10);
        CHECK(fleet.models[4].check_integrity() == "");
    }
}

TEST_CASE("pooled regression: to join its own kind, or to part from none, changes nothing") {
    Fleet fleet(2);
    fleet.factor[1] = 4;
    fleet.observe_all(60);
    double share = fleet.models[1].share();
    REQUIRE(share > 0.5);
    fleet.models[1].join_kind(fleet.models[0]);
    CHECK(fleet.models[1].share() == share);
    fleet.models[1].leave_kind();
    for (int n = 0; n < 40; ++n) fleet.observe(1);
    uint64_t samples = fleet.models[1].kind().samples();
    fleet.models[1].leave_kind();
    CHECK(fleet.models[1].kind().samples() == samples);
}

// Eight engines whose work takes 0.02 + 3e-5 n + 4e-4 f seconds: n tokens are computed, and f are fetched.
struct Fetching {
    explicit Fetching(size_t engines = 8) : factor(engines, 1.0) {
        for (size_t i = 0; i < engines; ++i) {
            models.emplace_back(std::array{0.05, 1e-4, 1e-4}, std::array{0.05, 1e-4, 3e-4}, 0.01);
            if (i != 0) models[i].join_kind(models[0]);
        }
    }
    static double seconds(double tokens, double fetched) { return 0.02 + 3e-5 * tokens + 4e-4 * fetched; }
    void observe(size_t engine, double tokens, double fetched, double factor = 1) {
        double noise = 0.9 + 0.0002 * static_cast<double>(random.below(1001));
        models[engine].observe(std::array{1.0, tokens, fetched}, noise * factor * seconds(tokens, fetched));
    }
    // Of all engines in turn at random; one in so many samples fetches.
    void observe_some(int samples, int fetch_every) {
        for (int n = 0; n < samples; ++n) {
            size_t engine = random.below(models.size());
            bool fetches = fetch_every != 0 && n % fetch_every == 0;
            observe(engine, static_cast<double>(random.between(100, 8000)), fetches ? 8000 : 0,
                    factor[engine]);
        }
    }
    // Of what the kind predicts, relative.
    double error(double tokens, double fetched) const {
        double right = seconds(tokens, fetched);
        double predicted = models[0].kind().predict(std::array{1.0, tokens, fetched});
        return std::abs(predicted - right) / right;
    }

    std::vector<PooledRegression> models;
    std::vector<double> factor;
    Random random;
};

TEST_CASE("pooled regression: what is rare teaches the kind, however far off it was") {
    Fetching fleet;
    fleet.observe_some(400, 0);
    REQUIRE(fleet.error(1000, 8000) > 0.5);
    fleet.observe_some(100, 25);  // four fetches
    CHECK(fleet.error(1000, 8000) < 0.15);
    CHECK(fleet.error(4000, 0) < 0.10);
    for (const PooledRegression& model : fleet.models) CHECK(model.share() < 0.5);
}

TEST_CASE("pooled regression: long prompts after short ones teach the kind") {
    Fetching fleet;
    for (int n = 0; n < 80; ++n) {
        fleet.observe(n % 8, static_cast<double>(fleet.random.between(5, 40)), 0);
    }
    for (int n = 0; n < 8; ++n) fleet.observe(n, 20000, 0);
    CHECK(fleet.error(20000, 0) < 0.15);
}

TEST_CASE(
    "pooled regression: an outlier, or a slow engine, that is first in what is rare is soon made good") {
    for (int first : {1, 4}) {
        for (double factor : {2.4, 0.1}) {
            CAPTURE(first);
            CAPTURE(factor);
            Fetching fleet;
            fleet.observe_some(400, 0);
            for (int n = 0; n < first; ++n) {
                fleet.observe(3, 1000, 8000, factor);
                fleet.observe(3, 4000, 0, first == 1 ? 1 : factor);
            }
            if (first > 1) fleet.factor[3] = factor;
            REQUIRE(fleet.error(1000, 8000) > 0.6);
            fleet.observe_some(1000, 25);
            CHECK(fleet.error(1000, 8000) < 0.25);
            CHECK(fleet.error(4000, 0) < 0.10);
        }
    }
}

}  // namespace
}  // namespace moonpool::testing
