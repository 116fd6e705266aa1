#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include "store/node/removals.hpp"

namespace moonpool {
namespace {

TEST_CASE("removals: another process goes on from where all copies are right, not from what was said last") {
    Removals removals;
    std::vector<std::pair<uint32_t, Version>> kept;
    removals.set_on_confirmed([&](uint32_t range, Version version) { kept.emplace_back(range, version); });
    removals.set_applied(0, 9);
    removals.confirm(0, 5);
    removals.confirm(0, 4);
    CHECK(removals.newest_for(Hash128{1, 1}) == 9);
    CHECK(removals.confirmed(0) == 5);
    CHECK(kept == std::vector<std::pair<uint32_t, Version>>{{0, 5}});

    Removals successor;
    successor.adopt(removals.give());
    CHECK(successor.applied(0) == 5);
    CHECK(successor.confirmed(0) == 5);
}

}  // namespace
}  // namespace moonpool
