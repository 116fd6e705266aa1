#include <doctest/doctest.h>

#include <cmath>

#include "../random.hpp"
#include "conductor/candidates.hpp"

namespace moonpool {
namespace {

std::shared_ptr<WorkerView> view(uint32_t place) {
    return std::make_shared<WorkerView>(place, 0, std::make_shared<WorkerLoad>(),
                                        std::make_shared<PrefillModel>(), std::make_shared<DecodeModel>());
}

// That the answers are right is compared with plain Python (test_candidates.py); here that there is always
// one, whatever the numbers, and that it is nobody who is left out.
TEST_CASE("candidates: somebody is found whatever the numbers") {
    testing::Random random(61);
    const double numbers[] = {0, 1, -1, 1e300, -1e300, INFINITY, -INFINITY, NAN};
    auto number = [&] { return numbers[random.below(std::size(numbers))]; };
    for (int story = 0; story < 2000; ++story) {
        std::vector<std::shared_ptr<WorkerView>> all;
        size_t count = 1 + random.below(5);
        for (uint32_t place = 0; place < count; ++place) {
            all.push_back(view(place));
            all.back()->obeys = random.one_in(2);
            all.back()->room_tokens = static_cast<int64_t>(random.below(3) * 500);
            if (random.one_in(2)) all.back()->load->prefill_began(1, 10, 0, 0, 0.5, 0, false);
            if (random.one_in(2)) all.back()->load->decode_began(1, 400, 0);
        }
        Candidates candidates(all);
        std::vector<uint32_t> own(random.below(count + 1), static_cast<uint32_t>(random.below(2000)));
        const WorkerView* without = random.one_in(2) ? all[random.below(count)].get() : nullptr;
        auto tokens = static_cast<int64_t>(random.below(2000));
        Cheapest best = candidates.cheapest({.tokens = tokens,
                                             .pool = static_cast<int64_t>(random.below(2000)),
                                             .now_s = number(),
                                             .ahead_s = number(),
                                             .urgency = number(),
                                             .marginal_delay = number(),
                                             .reuse_probability = number(),
                                             .spare_s = number(),
                                             .without = without,
                                             .last = all[random.below(count)].get(),
                                             .last_own = static_cast<int64_t>(random.below(10)) - 1,
                                             .noise = number(),
                                             .unseen_s = number()},
                                            own);
        REQUIRE(best.which < count);
        if (count > 1) REQUIRE(all[best.which].get() != without);
        if (count == 1) REQUIRE(best.reason == Reason::kOnly);
        REQUIRE(best.gap_s == all[best.which]->gap_s(tokens, 0));
        REQUIRE(candidates.least_gap(100, 200, number()).which < count);
    }
}

TEST_CASE("a worker: what is sent there enters its load at once") {
    auto there = view(0);
    Dispatched first = there->dispatched(1, {.tokens = 1000, .own = 200, .pool = 300}, 0.5, 7, false);
    CHECK(first.wait_s == 0);
    CHECK(first.prefill_s == 0.5);
    CHECK(first.fetch_s == there->prefill->transfer_s(300));
    CHECK(there->load->prefill_rest_tokens() == 500);
    CHECK(there->load->decodes() == 0);
    PrefillWork work{.tokens = 400, .ahead_s = 0.25};
    Dispatched second = there->dispatched(2, work, 0, 7.125, true);  // without a prediction: the model's
    work.queued = true;
    CHECK(second.wait_s == 0.375);
    CHECK(second.prefill_s == there->prefill->predict(work));
    CHECK(there->load->decodes() == 1);
    CHECK(there->load->context_tokens() == 400);
    CHECK(there->load->wait_s(7.125) == doctest::Approx(0.375 + second.prefill_s));
}

TEST_CASE("candidates: the least gap, where there is room") {
    std::vector<std::shared_ptr<WorkerView>> all{view(0), view(1), view(2)};
    Candidates candidates(all);
    all[0]->load->decode_began(1, 50000, 0);
    all[1]->room_tokens = 100;
    CHECK(candidates.least_gap(100, 200, 0).which == 2);
    all[2]->pending_handover = 1000;
    CHECK(candidates.least_gap(100, 200, 0).which == 0);
    all[0]->room_tokens = all[2]->room_tokens = 100;  // nowhere: the least of all
    CHECK(candidates.least_gap(100, 200, 0).which == 1);
    CHECK(candidates.least_gap(100, 200, 0).gap_s == doctest::Approx(0.01 + 0.0003 + 0.00002 * 0.1));
}

}  // namespace
}  // namespace moonpool
