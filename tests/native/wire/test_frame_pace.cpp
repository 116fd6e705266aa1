// When a peer inside a frame is given up, with times of the test's own.
#include <doctest/doctest.h>

#include <algorithm>

#include "wire/frame_pace.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kStart = 1'000'000;

Limits limits(uint32_t stalled_ms, uint32_t bytes_per_s) {
    Limits limits;
    limits.stalled_frame_ms = stalled_ms;
    limits.frame_bytes_per_s_min = bytes_per_s;
    return limits;
}

// Bytes that come in pieces, one each so many ms, with a look at the time each 50 ms. When the peer is given
// up, in ms since the start; 0: all of the bytes have come.
uint64_t given_up_ms(FramePace& pace, uint64_t bytes, uint64_t piece, uint64_t each_ms) {
    uint64_t left = bytes;
    for (uint64_t ms = 1;; ++ms) {
        if (ms % each_ms == 0) {
            uint64_t n = std::min(left, piece);
            pace.moved(n, kStart + ms);
            left -= n;
            if (left == 0) return 0;
        }
        if (ms % 50 == 0 && pace.is_late(kStart + ms)) return ms;
    }
}

}  // namespace

TEST_CASE("frame pace: one byte now and then does not keep a frame") {
    for (uint64_t each_ms : {10, 100, 1000, 9999}) {
        CAPTURE(each_ms);
        FramePace pace(limits(10000, 65536), kStart);
        uint64_t ms = given_up_ms(pace, 8 << 20, 1, each_ms);
        CHECK(ms > 10000);
        CHECK(ms < 10200);
    }
    // Nor what is half as fast as it has to be: 10 s, and 10 s more for each 655,360 bytes.
    FramePace pace(limits(10000, 65536), kStart);
    uint64_t ms = given_up_ms(pace, 8 << 20, 3277, 100);
    CHECK(ms > 19900);
    CHECK(ms < 20200);
}

TEST_CASE("frame pace: a frame is complete after a time by its size, or never") {
    for (uint64_t bytes_per_s : {70'000, 1'000'000, 50'000'000}) {
        CAPTURE(bytes_per_s);
        FramePace pace(limits(10000, 65536), kStart);
        CHECK(given_up_ms(pace, 8 << 20, bytes_per_s / 20, 50) == 0);
    }
    // A small one that is slower, and ends within the first 10 s.
    FramePace pace(limits(10000, 65536), kStart);
    CHECK(given_up_ms(pace, 900, 1, 10) == 0);
}

TEST_CASE("frame pace: what came fast gives a peer no more than the first time") {
    FramePace pace(limits(10000, 65536), kStart);
    pace.moved(64 << 20, kStart + 1);
    CHECK(given_up_ms(pace, 10, 1, 1000) == 0);
    FramePace other(limits(10000, 65536), kStart);
    other.moved(64 << 20, kStart + 1);
    CHECK(given_up_ms(other, 11, 1, 1000) == 10050);
}

TEST_CASE("frame pace: a rest begins anew, and time in which this process stood still is not the peer's") {
    FramePace pace(limits(10000, 65536), kStart);
    const uint64_t rest = kStart + 500'000;
    pace.restart(rest);
    uint64_t ms = 0;
    for (; ms <= 9000; ms += 50) CHECK_FALSE(pace.is_late(rest + ms));
    // A minute later the loop goes on: it finds what has come before it looks at the time.
    ms += 60'000;
    pace.moved(1, rest + ms);
    for (int looks = 0; looks < 19; ++looks, ms += 50) CHECK_FALSE(pace.is_late(rest + ms));
    for (int looks = 0; looks < 3; ++looks, ms += 50) (void)pace.is_late(rest + ms);
    CHECK(pace.is_late(rest + ms));
}
