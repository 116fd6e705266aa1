#include <doctest/doctest.h>

#include "../random.hpp"
#include "store/node/use_clock.hpp"

namespace moonpool {
namespace {

TEST_CASE("use clock: about when a use was, never too long ago") {
    testing::Random random(11);
    UseClock clock;
    std::vector<uint64_t> when{0};  // by use
    uint64_t now = 1000;
    CHECK(clock.age_ms(now, 5) == 0);  // nothing is known
    for (int beat = 0; beat < 5000; ++beat) {
        for (uint64_t uses = random.below(4); uses > 0; --uses) when.push_back(now);
        now += 200;
        clock.sample(now, when.size() - 1);
        uint64_t use = random.between(1, when.size());
        if (use == when.size()) continue;
        uint64_t age = now - when[use];
        REQUIRE(clock.age_ms(now, use) <= age);
        // The samples thin out with age: what is far back is known to within a fraction of it.
        REQUIRE(clock.age_ms(now, use) + age / 7 + 1000 >= age);
    }
}

}  // namespace
}  // namespace moonpool
