// Random numbers for tests against a slow model: a seed that is printed, or taken from MOONPOOL_TEST_SEED to
// repeat a failing run.
#pragma once

#include <algorithm>
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
    // Optimised, in a test that is not: tests fill megabytes. By splitmix64, of Steele, Lea and Flood.
    [[gnu::optimize("O2"), gnu::no_sanitize("thread")]] void fill(void* data, size_t size) {
        uint64_t value = next();
        for (size_t at = 0; at < size; at += sizeof(value)) {
            uint64_t mixed = value += 0x9E3779B97F4A7C15;
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
            mixed ^= mixed >> 31;
            __builtin_memcpy(static_cast<char*>(data) + at, &mixed, std::min(sizeof(mixed), size - at));
        }
    }

   private:
    std::mt19937_64 engine_;
};

}  // namespace moonpool::testing
