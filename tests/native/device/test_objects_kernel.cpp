// The kernel against plain loops: layouts, block sizes, contents of every dtype, odd alignments.
#include "bed.hpp"
#include "kv_cache.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::DeviceMemory;
using device::KvObject;
using device::KvRow;
using device::Move;
using device::must;
using device::ObjectsJob;
using device::ObjectsKernel;
using device::Stream;

namespace {

// Cache -> staging buffer -> another cache, which then is the same; in between every object is in order.
void round_trip(Bed& bed, const ObjectsKernel& kernel, const KvShape& shape) {
    Random random(2310);
    Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
    uint64_t margin = 64;  // that no row touches, on either side
    auto room = [&](uint64_t bytes) { return must(DeviceMemory::allocate(bed.device, bytes + 2 * margin)); };
    DeviceMemory cache = room(shape.bytes()), back = room(shape.bytes());
    DeviceMemory staging = room(shape.object_bytes() * shape.objects());
    uint64_t in_cache = margin + shape.shift, in_staging = margin + shape.staging_shift;
    Pinned truth(bed, cache.bytes()), zero(bed, staging.bytes()), seen(bed, cache.bytes()),
        staged(bed, staging.bytes());
    truth.fill(random);
    std::memset(zero.data(), 0, zero.size());
    REQUIRE(stream.copy({cache.address(), truth.address(), cache.bytes()}));
    REQUIRE(stream.copy({back.address(), zero.address(), std::min(back.bytes(), staging.bytes())}));
    REQUIRE(stream.copy({staging.address(), zero.address(), staging.bytes()}));

    RowTable table = row_table(shape, cache.address() + in_cache);
    RowTable target = row_table(shape, back.address() + in_cache);
    std::vector<KvObject> objects;
    for (unsigned i = 0; i < shape.objects(); ++i) {
        objects.push_back({i * shape.object_bytes(), block_of(shape, i), i % shape.heads});
    }
    DeviceMemory rows = upload(bed, table.rows), back_rows = upload(bed, target.rows);
    DeviceMemory begins = upload(bed, table.begins), names = upload(bed, objects);
    ObjectsJob job{.rows = rows.address(),
                   .begins = begins.address(),
                   .objects = names.address(),
                   .count = shape.objects(),
                   .split = static_cast<uint32_t>(random.between(1, 5)),
                   .staging = staging.address() + in_staging,
                   .move = Move::kToStaging};
    REQUIRE(kernel.launch(stream, job, static_cast<uint32_t>(random.between(1, 3)),
                          32 * static_cast<uint32_t>(random.between(1, 32))));
    REQUIRE(stream.copy({staged.address(), staging.address(), staging.bytes()}));
    job.rows = back_rows.address();
    job.move = Move::kToKv;
    REQUIRE(kernel.launch(stream, job, 2, 256));
    REQUIRE(stream.copy({seen.address(), back.address(), back.bytes()}));
    finish(bed, stream);

    for (unsigned i = 0; i < shape.objects(); ++i) {
        std::vector<unsigned char> expected = object_of(shape, truth.data() + in_cache, i);
        CHECK(std::memcmp(staged.data() + in_staging + i * shape.object_bytes(), expected.data(),
                          expected.size()) == 0);
    }
    CHECK(std::memcmp(seen.data() + in_cache, truth.data() + in_cache, shape.bytes()) == 0);
    CHECK(staged.data()[in_staging - 1] == 0);
    CHECK(staged.data()[in_staging + shape.objects() * shape.object_bytes()] == 0);
}

}  // namespace

TEST_CASE("device: the kernel moves the objects of every layout and content, at every alignment") {
    Bed bed(Policy::kShuffled, Random(2311).next());
    {
        ObjectsKernel kernel = must(ObjectsKernel::load(bed.device));
        // 512: bf16 heads of 128, K and V; 656 and 584: FP8 with scales; 1152: MLA in bf16; 24 and 1: small.
        for (unsigned content : {512u, 656u, 584u, 1152u, 24u, 1u}) {
            for (bool tokens_first : {true, false}) {
                KvShape shape{.tokens_first = tokens_first, .content = content};
                CAPTURE(content);
                CAPTURE(tokens_first);
                round_trip(bed, kernel, shape);
                shape.heads = 1;  // MLA
                shape.tokens = 1;
                round_trip(bed, kernel, shape);
            }
        }
        for (unsigned shift : {1u, 2u, 3u, 4u, 8u, 12u}) {
            for (unsigned staging_shift : {0u, 1u, 4u, 8u}) {
                CAPTURE(shift);
                CAPTURE(staging_shift);
                round_trip(bed, kernel, {.content = 40, .shift = shift, .staging_shift = staging_shift});
            }
        }
        for (unsigned tokens : {1u, 3u, 16u, 33u}) {
            round_trip(bed, kernel, {.layers = 3, .heads = 1, .tokens = tokens, .content = 72});
        }
    }
    bed.end();
}

TEST_CASE("device: the kernel with tables of random rows, empty ones and columns among them") {
    each_policy([](Bed& bed) {
        Random random(2312);
        ObjectsKernel kernel = must(ObjectsKernel::load(bed.device));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
        constexpr uint32_t kBlocks = 3;
        std::vector<KvRow> rows;
        std::vector<uint32_t> begins{0};
        uint64_t stride = 0;
        uint32_t object_bytes = 0;
        for (int column = 0; column < 4; ++column) {
            uint32_t offset = 0;
            for (uint64_t n = random.below(7); n > 0; --n) {
                stride += random.below(20);
                uint32_t bytes = static_cast<uint32_t>(random.below(200));
                rows.push_back({stride, 0, bytes, offset});
                stride += bytes;
                offset += bytes;
            }
            begins.push_back(static_cast<uint32_t>(rows.size()));
            object_bytes = std::max(object_bytes, offset);
        }
        stride += 1;
        Pinned truth(bed, kBlocks * stride), staged(bed, kBlocks * 4 * (object_bytes + 1));
        truth.fill(random);
        DeviceMemory cache = must(DeviceMemory::allocate(bed.device, truth.size()));
        DeviceMemory staging = must(DeviceMemory::allocate(bed.device, staged.size()));
        REQUIRE(stream.copy({cache.address(), truth.address(), truth.size()}));
        std::vector<KvObject> objects;
        for (uint32_t block = 0; block < kBlocks; ++block) {
            for (uint32_t column = 0; column < 4; ++column) {
                objects.push_back({objects.size() * (object_bytes + 1), block, column});
            }
        }
        std::vector<KvRow> there = rows;
        for (KvRow& row : there) {
            row.address += cache.address();
            row.stride = stride;
        }
        there.push_back({});  // an allocation is never empty
        DeviceMemory on_card = upload(bed, there), ends = upload(bed, begins), names = upload(bed, objects);
        ObjectsJob job{.rows = on_card.address(),
                       .begins = ends.address(),
                       .objects = names.address(),
                       .count = static_cast<uint32_t>(objects.size()),
                       .split = 2,
                       .staging = staging.address(),
                       .move = Move::kToStaging};
        REQUIRE(kernel.launch(stream, job, 2, 256));
        REQUIRE(stream.copy({staged.address(), staging.address(), staged.size()}));
        finish(bed, stream);
        for (const KvObject& object : objects) {
            for (uint32_t r = begins[object.column]; r < begins[object.column + 1]; ++r) {
                CHECK(std::memcmp(staged.data() + object.staged + rows[r].offset,
                                  truth.data() + rows[r].address + object.block * stride,
                                  rows[r].bytes) == 0);
            }
        }
    });
}

TEST_CASE("device: a launch of nothing is none, and one that cannot be is refused") {
    Bed bed;
    {
        ObjectsKernel kernel = must(ObjectsKernel::load(bed.device));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
        CHECK(kernel.launch(stream, {.count = 0}, 1, 256));
        CHECK_FALSE(kernel.launch(stream, {.count = 1, .split = 0}, 1, 256));
        CHECK_FALSE(kernel.launch(stream, {.count = 1}, 0, 256));
        for (uint32_t threads : {0, 33, 1056}) CHECK_FALSE(kernel.launch(stream, {.count = 1}, 1, threads));
        CHECK(kernel.launch(stream, {.count = 1u << 31, .split = 4}, 1, 256).error().code ==
              Code::kInvalidArgument);
    }
    bed.end();
}

TEST_CASE("device: a row outside of its allocation is found in the kernel") {
    if (is_real()) return;
    Bed bed;
    {
        ObjectsKernel kernel = must(ObjectsKernel::load(bed.device));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
        DeviceMemory cache = must(DeviceMemory::allocate(bed.device, 4096));
        DeviceMemory rows = upload(bed, std::vector<KvRow>{{cache.address(), 2048, 1024, 0}});
        DeviceMemory begins = upload(bed, std::vector<uint32_t>{0, 1});
        DeviceMemory names = upload(bed, std::vector<KvObject>{{0, 2, 0}});  // block 2 of two
        REQUIRE(kernel.launch(stream,
                              {.rows = rows.address(),
                               .begins = begins.address(),
                               .objects = names.address(),
                               .count = 1,
                               .staging = cache.address()},
                              1, 256));
        soft_device().soft_settle();
        char text[200];
        CHECK(soft_device().soft_violations(text, sizeof(text)) >= 1);
        CHECK(std::string(text).find("read of 16 bytes") == 0);
        CHECK(bed.device->lost() == 0);
        CHECK_FALSE(stream.copy({cache.address(), cache.address(), 1}));
        CHECK(bed.device->lost() == device::cu::kIllegalAddress);
    }
    bed.forget();
}

TEST_CASE("device: a card that is too old, and a driver that refuses the PTX, say so") {
    if (is_real()) return;
    soft_device().soft_reset(0, 1);
    device::Driver::use_library_for_tests(soft_library());
    soft_device().soft_set_capability(61);
    std::shared_ptr<device::Device> old = must(device::Device::open(0));
    CHECK(ObjectsKernel::load(old).error().text ==
          "the CUDA device is of compute capability 6.1, and the kernel needs 7.0");
    old.reset();
    Bed bed;
    soft_device().soft_fail("cuModuleLoadDataEx", 1, device::cu::kInvalidPtx);
    Result<ObjectsKernel> refused = ObjectsKernel::load(bed.device);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Code::kUnavailable);
    CHECK(refused.error().text.find("(CUDA error 218): ptxas fatal: soft") != std::string::npos);
    soft_device().soft_fail("cuModuleGetFunction", 1, device::cu::kNotFound);
    CHECK_FALSE(ObjectsKernel::load(bed.device));
    bed.end();  // the module is given back
}
