// Leases against a slow model: an owner for each byte.
#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "../random.hpp"
#include "memory/leases.hpp"

using namespace moonpool;
using moonpool::testing::Random;

TEST_CASE("leases: random leases, commits, deaths and returns; every byte has one owner and comes back") {
    Random random(100);
    constexpr uint64_t kBytes = 4096;
    ExtentAllocator allocator;
    Leases leases(allocator);
    allocator.grow(kBytes);
    std::vector<Extent> open, objects;
    auto inside_open = [&](Extent e) {
        for (Extent lease : open) {
            if (e.offset >= lease.offset && e.end() <= lease.end()) return true;
        }
        return false;
    };
    for (int step = 0; step < 5000; ++step) {
        switch (random.below(5)) {
            case 0:
                if (auto lease = leases.open(random.between(1, 200), random.between(1, 600), 64))
                    open.push_back(*lease);
                break;
            case 1:
            case 2: {
                Extent object{random.below(kBytes), random.between(1, 60)};
                bool free_place = inside_open(object);
                for (Extent other : objects)
                    free_place &= object.end() <= other.offset || object.offset >= other.end();
                REQUIRE(leases.inside_open(object) == inside_open(object));
                REQUIRE(leases.commit(object) == free_place);
                if (free_place) objects.push_back(object);
                break;
            }
            case 3:
                if (objects.empty()) break;
                std::swap(objects[random.below(objects.size())], objects.back());
                leases.free(objects.back());
                objects.pop_back();
                break;
            case 4:
                if (open.empty()) break;
                std::swap(open[random.below(open.size())], open.back());
                leases.close(open.back().offset);
                open.pop_back();
                break;
        }
        REQUIRE(leases.check_integrity());
        // Whatever is neither leased nor an object is free, and nothing else is.
        std::vector<bool> taken(kBytes, false);
        for (Extent e : open) std::fill(taken.begin() + long(e.offset), taken.begin() + long(e.end()), true);
        for (Extent e : objects)
            std::fill(taken.begin() + long(e.offset), taken.begin() + long(e.end()), true);
        uint64_t free_bytes = 0;
        for (bool t : taken) free_bytes += !t;
        REQUIRE(allocator.free_bytes() == free_bytes);
        allocator.for_each([&](Extent e) {
            for (uint64_t i = e.offset; i < e.end(); ++i) REQUIRE_FALSE(taken[i]);
        });
    }
    for (Extent e : open) leases.close(e.offset);
    for (Extent e : objects) leases.free(e);
    CHECK(allocator.free_bytes() == kBytes);
    CHECK(allocator.extents() == 1);
}

TEST_CASE("leases: an object that dies in an open lease does not let another lease in") {
    ExtentAllocator allocator;
    Leases leases(allocator);
    allocator.grow(1024);
    Extent lease = *leases.open(1024, 1024, 1);
    REQUIRE(leases.commit({0, 512}));
    leases.free({0, 512});
    CHECK_FALSE(leases.open(1, 1, 1));
    leases.close(lease.offset);
    CHECK(leases.open(1024, 1024, 1));
}
