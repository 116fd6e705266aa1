#include <doctest/doctest.h>

#include "../random.hpp"
#include "conductor/worker_load.hpp"

namespace moonpool {
namespace {

// What they say is compared with plain Python in tests/disagg_proxy/conductor/test_worker_load.py; here the
// line's links are looked at, with the sanitizers on.
TEST_CASE("load: random stories keep them straight") {
    testing::Random random(51);
    for (int story = 0; story < 50; ++story) {
        WorkerLoad load;
        double now_s = 0;
        for (int step = 0; step < 400; ++step) {
            now_s += random.one_in(3) ? -0.01 : static_cast<double>(random.below(1000)) / 1000;
            auto request = static_cast<int64_t>(random.below(12)) - 6;
            auto tokens = static_cast<int64_t>(random.below(1000));
            double seconds = static_cast<double>(random.below(1000)) / 1000;
            switch (random.below(16)) {
                case 0:
                    if (random.one_in(4)) load.forget_all();
                    break;
                case 1 ... 5:
                    load.prefill_began(request, tokens, tokens / 3, tokens / 4, seconds, now_s,
                                       random.one_in(3));
                    break;
                case 6 ... 9:
                    load.prefill_ended(request, now_s, !random.one_in(4));
                    break;
                case 10 ... 12:
                    load.decode_began(request, tokens, now_s);
                    break;
                default:
                    load.decode_ended(request, static_cast<int64_t>(random.below(5)), now_s);
            }
            if (random.one_in(2)) REQUIRE(load.wait_s(now_s) >= 0);
            REQUIRE(load.check_integrity() == "");
        }
    }
}

TEST_CASE("load: who is in prefill and decode at once is one request") {
    WorkerLoad load;
    load.prefill_began(1, 100, 10, 20, 1.0, 0.0, true);
    load.decode_began(1, 100, 0.0);
    CHECK(load.requests() == 1);
    CHECK(load.prefill_rest_tokens() == 70);
    CHECK(load.wait_s(0.25) == doctest::Approx(0.75));
    CHECK(load.wait_s(1.0) == 0);  // it was silent: its time is over
    CHECK(load.prefills() == 0);
    CHECK(load.requests() == 1);
    CHECK(load.decode_ended(1, 11, 5.0)->gap_s == doctest::Approx(0.5));
    CHECK(load.requests() == 0);
}

}  // namespace
}  // namespace moonpool
