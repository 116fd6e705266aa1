// Random numbers for tests against a slow model: a seed that is printed, or taken from MOONPOOL_TEST_SEED to
// repeat a failing run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace moonpool::testing {

inline uint64_t seed() {
    static const uint64_t value = [] {
        const char* given = std::getenv("MOONPOOL_TEST_SEED");
        uint64_t s = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
        std::cerr << "seed: " << s << " (repeat with MOONPOOL_TEST_SEED=" << s << ")\n";
        return s;
    }();
    return value;
}

class Random {
   public:
    explicit Random(uint64_t salt = 0) : engine_(seed() + salt) {}

    uint64_t below(uint64_t n) { return engine_() % n; }
    uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
    bool one_in(uint64_t n) { return below(n) == 0; }
    uint64_t next() { return engine_(); }

   private:
    std::mt19937_64 engine_;
};

}  // namespace moonpool::testing
