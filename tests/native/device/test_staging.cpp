// Two halves of device memory between two streams.
#include "bed.hpp"
#include "device/staging.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::DeviceMemory;
using device::must;
using device::Staging;
using device::StagingOptions;
using device::Stream;

namespace {

constexpr uint64_t kHalf = 4096;

}  // namespace

TEST_CASE("device: what goes through the halves of a staging buffer keeps its order between streams") {
    each_policy([](Bed& bed) {
        Random random(2330);
        Staging staging = must(Staging::open(bed.device, {.half_bytes = kHalf}));
        CHECK(staging.half_bytes() == kHalf);
        CHECK(staging.address(1) == staging.address(0) + kHalf);
        Stream copies = must(Stream::create(bed.device, Stream::Priority::kDefault));
        Stream kernels = must(Stream::create(bed.device, Stream::Priority::kLowest));
        constexpr uint64_t kRounds = 9;
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kRounds * kHalf));
        Pinned truth(bed, kRounds * kHalf), seen(bed, kRounds * kHalf);
        truth.fill(random);
        for (uint64_t i = 0; i < kRounds; ++i) {
            size_t half = i % Staging::kHalves;
            REQUIRE(staging.begin(half, copies));
            REQUIRE(copies.copy({staging.address(half), truth.address() + i * kHalf, kHalf}));
            REQUIRE(staging.end(half, copies));
            REQUIRE(staging.begin(half, kernels));
            REQUIRE(kernels.copy({card.address() + i * kHalf, staging.address(half), kHalf}));
            REQUIRE(staging.end(half, kernels));
        }
        REQUIRE(kernels.copy({seen.address(), card.address(), kRounds * kHalf}));
        finish(bed, kernels);
        CHECK(seen.bytes() == truth.bytes());
        CHECK(staging.close(10000));
        CHECK(staging.close(10000));
    });
}

TEST_CASE("device: a staging buffer is halved where the card has no room, and absent with a reason") {
    if (is_real()) return;
    Bed bed;
    StagingOptions options;
    CHECK(options.half_bytes == 32u << 20);
    CHECK(must(Staging::open(bed.device, options)).half_bytes() == 32u << 20);
    soft_device().soft_limit(20u << 20, UINT64_MAX);
    CHECK(must(Staging::open(bed.device, options)).half_bytes() == 8u << 20);
    soft_device().soft_limit(8u << 20, UINT64_MAX);
    CHECK(must(Staging::open(bed.device, options)).half_bytes() == 4u << 20);
    soft_device().soft_limit((8u << 20) - 1, UINT64_MAX);
    Result<Staging> none = Staging::open(bed.device, options);
    REQUIRE_FALSE(none);
    CHECK(none.error().text.find("no device memory of 2 x 4194304 bytes: cuMemAlloc: ") == 0);
    bed.end();
}

TEST_CASE("device: a staging buffer of a card that hangs is kept") {
    if (is_real()) return;
    Bed bed;
    {
        Staging staging = must(Staging::open(bed.device, {.half_bytes = kHalf}));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        soft_device().soft_hang(1);
        REQUIRE(stream.copy({staging.address(0), staging.address(1), kHalf}));
        REQUIRE(staging.end(0, stream));
        Status closed = staging.close(10);
        REQUIRE_FALSE(closed);
        CHECK(closed.error().text ==
              "the CUDA device still uses the staging buffer: its 8192 bytes are kept");
        soft_device().soft_unhang();
    }
    bed.end(1);
}
