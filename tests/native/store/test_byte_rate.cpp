#include <doctest/doctest.h>

#include "store/node/byte_rate.hpp"

using namespace moonpool;

TEST_CASE("byte rate: one object may be larger than a second's bytes, and the mean holds") {
    ByteRate rate;
    CHECK_FALSE(rate.is_over(1000, 0));
    rate.take(3500);
    CHECK(rate.is_over(1000, 0));
    CHECK(rate.is_over(1000, 2499));
    CHECK_FALSE(rate.is_over(1000, 2501));
    // However long nothing was moved, no more than one second's bytes wait.
    CHECK_FALSE(rate.is_over(1000, 1'000'000));
    rate.take(1001);
    CHECK(rate.is_over(1000, 1'000'000));
}

TEST_CASE("byte rate: another rate begins anew, and none limits nothing") {
    ByteRate rate;
    CHECK_FALSE(rate.is_over(10, 0));
    rate.take(1'000'000);
    CHECK(rate.is_over(10, 1000));
    CHECK_FALSE(rate.is_over(20, 1000));
    rate.take(1'000'000);
    CHECK_FALSE(rate.is_over(std::nullopt, 1000));
    rate.take(UINT64_MAX);
    CHECK_FALSE(rate.is_over(std::nullopt, 1001));
    CHECK(rate.is_over(0, 1002));  // nothing at all
}
