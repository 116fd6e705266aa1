#include <doctest/doctest.h>

#include "../random.hpp"
#include "conductor/books.hpp"

namespace moonpool {
namespace {

// What they say is compared with plain Python in tests/disagg_proxy/conductor/test_books.py; here the line's
// links are looked at, with the sanitizers on.
TEST_CASE("books: random stories keep them straight") {
    testing::Random random(51);
    for (int story = 0; story < 50; ++story) {
        Books books;
        double now_s = 0;
        for (int step = 0; step < 400; ++step) {
            now_s += random.one_in(3) ? -0.01 : static_cast<double>(random.below(1000)) / 1000;
            auto request = static_cast<int64_t>(random.below(12)) - 6;
            auto tokens = static_cast<int64_t>(random.below(1000));
            double seconds = static_cast<double>(random.below(1000)) / 1000;
            switch (random.below(16)) {
                case 0:
                    if (random.one_in(4)) books.forget_all();
                    break;
                case 1 ... 5:
                    books.prefill_began(request, tokens, tokens / 3, tokens / 4, seconds, now_s,
                                        random.one_in(3));
                    break;
                case 6 ... 9:
                    books.prefill_ended(request, now_s, !random.one_in(4));
                    break;
                case 10 ... 12:
                    books.decode_began(request, tokens, now_s);
                    break;
                default:
                    books.decode_ended(request, static_cast<int64_t>(random.below(5)), now_s);
            }
            if (random.one_in(2)) REQUIRE(books.wait_s(now_s) >= 0);
            REQUIRE(books.check_integrity() == "");
        }
    }
}

TEST_CASE("books: who is in prefill and decode at once is one request") {
    Books books;
    books.prefill_began(1, 100, 10, 20, 1.0, 0.0, true);
    books.decode_began(1, 100, 0.0);
    CHECK(books.requests() == 1);
    CHECK(books.prefill_rest_tokens() == 70);
    CHECK(books.wait_s(0.25) == doctest::Approx(0.75));
    CHECK(books.wait_s(1.0) == 0);  // it was silent: its time is over
    CHECK(books.prefills() == 0);
    CHECK(books.requests() == 1);
    CHECK(books.decode_ended(1, 11, 5.0)->gap_s == doctest::Approx(0.5));
    CHECK(books.requests() == 0);
}

}  // namespace
}  // namespace moonpool
