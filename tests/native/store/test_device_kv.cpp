// KV caches in a card's memory, saved to a node and loaded from it, on the software device under all its
// policies.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_kv_bed.hpp"
#include "store/device/direct_mover.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

// Saves all of a cache that an engine has just written, and loads it into other blocks of another cache,
// which an earlier owner has just written.
void round_trip(Bed& bed, const Node& node, const DeviceKvOptions& options, const KvShape& shape) {
    Random random(77);
    Client client(node.options());
    REQUIRE(client.connect());
    Cache from(bed, shape), to(bed, shape);
    std::shared_ptr<DeviceKv> source = from.open(options), target = to.open(options);
    Objects saved(shape, 'A'), loaded(shape, 'A', 2);
    from.write(random);
    auto report = must(save(*source, client, saved, must(source->mark(from.stream()))));
    for (PutOutcome outcome : report.outcomes) CHECK(outcome == PutOutcome::kStored);
    CHECK(report.stored_bytes == shape.bytes());
    std::vector<unsigned char> truth = from.host.bytes();

    to.write(random);
    LoadReport got = load(*target, client, loaded, shape.heads, must(target->mark(to.stream())));
    CHECK(all_ok(got));
    CHECK(got.error == "");
    CHECK(got.bytes == shape.bytes());
    std::vector<unsigned char> there = to.read();
    for (size_t i = 0; i < saved.blocks.size(); ++i) {
        CHECK(object_at(shape, truth, saved.blocks[i], saved.columns[i]) ==
              object_at(shape, there, loaded.blocks[i], loaded.columns[i]));
    }
    REQUIRE(client.remove(saved.views()));
    REQUIRE(source->close(5000));
    REQUIRE(target->close(5000));
}

}  // namespace

TEST_CASE("device kv: what an engine computes is saved, and loaded into other blocks") {
    Node node;
    for (bool tokens_first : {true, false}) {
        for (unsigned content : {512u, 24u, 656u}) {
            KvShape shape = kShape;
            shape.tokens_first = tokens_first;
            shape.content = content;
            CAPTURE(tokens_first);
            CAPTURE(content);
            each_policy([&](Bed& bed) { round_trip(bed, node, kSmall, shape); });
        }
    }
}

TEST_CASE("device kv: without the kernel each row is copied by itself, with and without batches") {
    Node node;
    for (bool tokens_first : {true, false}) {
        for (bool batches : {true, false}) {
            if (!batches && is_real()) continue;
            KvShape shape = kShape;
            shape.tokens_first = tokens_first;
            CAPTURE(tokens_first);
            CAPTURE(batches);
            each_policy([&](Bed& bed) {
                if (!batches) {
                    soft_device().soft_hide("cuMemcpyBatchAsync");
                    device::Driver::use_library_for_tests(soft_library());  // looked up anew
                    bed.device = must(device::Device::open(0));
                }
                round_trip(bed, node, kDirect, shape);
                if (is_real()) return;
                CHECK(soft_device().soft_calls("cuLaunchKernel") == 0);
                CHECK((soft_device().soft_calls("cuMemcpyBatchAsync") > 0) == batches);
            });
        }
    }
}

TEST_CASE("device kv: long rows take no kernel and no memory of the card") {
    Node node;
    // 32 KiB of each layer, and both layers of a block and head one after the other.
    constexpr KvShape kLong{
        .tokens_first = false, .layers = 2, .heads = 2, .tokens = 64, .blocks = 3, .content = 512};
    each_policy([&](Bed& bed) {
        Random random(85);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache cache(bed, kLong);
        std::vector<std::vector<StridedRow>> columns(kLong.heads);
        const uint64_t row = kLong.object_bytes() / kLong.layers;
        for (unsigned head = 0; head < kLong.heads; ++head) {
            for (unsigned layer = 0; layer < kLong.layers; ++layer) {
                uint64_t at = head * kLong.object_bytes() + layer * row;
                columns[head].push_back(
                    {cache.memory.address() + at, kLong.heads * kLong.object_bytes(), row});
            }
        }
        int allocations = is_real() ? 0 : soft_device().soft_calls("cuMemAlloc");
        DeviceKvOptions options{.ring_bytes = 1 << 20, .slot_bytes = 128 << 10};
        std::shared_ptr<DeviceKv> kv = must(DeviceKv::open(0, PartTable(columns), kLong.blocks, options));
        Objects objects(kLong, 'L');
        cache.write(random);
        must(save(*kv, client, objects, must(kv->mark(cache.stream()))));
        std::vector<unsigned char> truth = cache.host.bytes();
        cache.write(random);
        CHECK(all_ok(load(*kv, client, objects, kLong.heads, must(kv->mark(cache.stream())))));
        CHECK(cache.read() == truth);
        REQUIRE(client.remove(objects.views()));
        if (is_real()) return;
        CHECK(soft_device().soft_calls("cuMemAlloc") == allocations);
        CHECK(soft_device().soft_calls("cuModuleLoadDataEx") == 0);
    });
}

TEST_CASE("device kv: rows are long enough when all of them are, and adjoining ones count as one") {
    constexpr uint64_t kRow = 64 << 10, kHalf = kRow / 2, kStride = 16 * kRow;
    auto fits = [](std::vector<std::vector<StridedRow>> columns) {
        return DirectMover::fits(PartTable(std::move(columns)), kRow);
    };
    CHECK(fits({{{0, kStride, kRow}, {2 * kRow, kStride, kRow}}, {{4 * kRow, kStride, kRow + 1}}}));
    CHECK_FALSE(fits({{{0, kStride, kRow}}, {{2 * kRow, kStride, kRow}, {4 * kRow, kStride, kRow - 1}}}));
    CHECK(fits({{{0, kStride, kHalf}, {kHalf, kStride, kHalf}}}));
    CHECK_FALSE(fits({{{0, kStride, kHalf}, {kHalf, 2 * kStride, kHalf}}}));  // in block 0 alone
    CHECK_FALSE(fits({{{0, kStride, kHalf}, {kHalf + 1, kStride, kHalf}}}));
}

TEST_CASE(
    "device kv: a save that does not wait for the forward, and a load that does not wait for what was "
    "queued") {
    Node node;
    if (is_real()) return;
    for (int run = 0; run < 8; ++run) {
        bool in_save = (run & 1) != 0, direct = (run & 2) != 0, early = (run & 4) != 0;
        CAPTURE(in_save);
        CAPTURE(direct);
        CAPTURE(early);
        Bed bed(early ? Policy::kEarly : Policy::kLate);
        {
            Random random(78);
            Client client(node.options());
            REQUIRE(client.connect());
            Cache from(bed), to(bed);
            const DeviceKvOptions& options = direct ? kDirect : kSmall;
            std::shared_ptr<DeviceKv> source = from.open(options), target = to.open(options);
            Objects objects(kShape, static_cast<char>('a' + run));
            from.write(random);
            Mark computed = must(source->mark(from.stream()));
            must(save(*source, client, objects, in_save ? nullptr : computed));
            std::vector<unsigned char> truth = from.host.bytes();
            to.write(random);
            Mark before = must(target->mark(to.stream()));
            CHECK(all_ok(load(*target, client, objects, kShape.heads, in_save ? before : nullptr)));
            finish(bed, from.engine);
            finish(bed, to.engine);
            CHECK(to.read() != truth);
        }
        bed.end();
    }
}

TEST_CASE("device kv: an object that is gone fails alone, and its block keeps what it had") {
    Node node;
    each_policy([&](Bed& bed) {
        Random random(79);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache cache(bed);
        std::shared_ptr<DeviceKv> kv = cache.open(kSmall);
        Objects objects(kShape, 'g');
        cache.write(random);
        Mark computed = must(kv->mark(cache.stream()));
        must(save(*kv, client, objects, computed));
        std::vector<unsigned char> truth = cache.host.bytes();
        cache.write(random);
        std::vector<unsigned char> before = cache.host.bytes();
        std::vector<std::string_view> names = objects.views();
        std::vector<Descriptor> handed;
        std::string holders;
        {
            Prefix prefix = must(client.longest_prefix(names, kShape.heads, true));
            Handover handover = Client::hand_over(prefix);
            handed = handover.descriptors;
            holders = handover.holders;
        }  // the pin is over
        REQUIRE(client.remove(std::span(&names[3], 1)));
        LoadReport report = kv->load(client, {holders, handed, objects.blocks, objects.columns, false,
                                              must(kv->mark(cache.stream()))});
        CHECK(report.error == "a pinned object was removed before it was loaded");
        std::vector<unsigned char> there = cache.read();
        for (size_t i = 0; i < names.size(); ++i) {
            CHECK(report.ok[i] == (i == 3 ? 0 : 1));
            CHECK(object_at(kShape, there, objects.blocks[i], objects.columns[i]) ==
                  object_at(kShape, i == 3 ? before : truth, objects.blocks[i], objects.columns[i]));
        }
        REQUIRE(client.remove(names));
    });
}

TEST_CASE("device kv: loads and saves of many threads, through a ring with slots for two") {
    Node node;
    each_policy([&](Bed& bed) {
        Random random(80);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache from(bed), to(bed);
        std::shared_ptr<DeviceKv> source = from.open(kTight), target = to.open(kTight);
        from.write(random);
        Mark computed = must(source->mark(from.stream()));
        constexpr int kThreads = 4;
        auto parallel = [&](auto body) {
            std::vector<std::thread> threads;
            for (int i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { body(i); });
            for (std::thread& thread : threads) thread.join();
        };
        std::atomic<int> stored{0}, loaded{0}, staged{0};
        parallel([&](int i) {
            Objects objects(kShape, static_cast<char>('0' + i));
            std::vector<std::string_view> names = objects.views();
            auto report = save_now(*source, client, {names, {}, 0, objects.blocks, objects.columns, computed},
                                   [&] { ++staged; });
            if (report) stored += static_cast<int>(report->outcomes.size());
        });
        CHECK(stored == kThreads * static_cast<int>(kShape.objects()));
        CHECK(staged == kThreads);
        std::vector<unsigned char> truth = from.host.bytes();
        parallel([&](int i) {
            Objects objects(kShape, static_cast<char>('0' + i));
            std::vector<std::string_view> names = objects.views();
            auto prefix = client.longest_prefix(names, kShape.heads, true);
            if (!prefix) return;
            Handover handover = Client::hand_over(*prefix);
            LoadReport report = target->load(client, {handover.holders, handover.descriptors, objects.blocks,
                                                      objects.columns, false, nullptr});
            if (all_ok(report)) ++loaded;
        });
        CHECK(loaded == kThreads);
        CHECK(to.read() == truth);
        for (int i = 0; i < kThreads; ++i) {
            Objects objects(kShape, static_cast<char>('0' + i));
            REQUIRE(client.remove(objects.views()));
        }
    });
}

TEST_CASE("device kv: a card that dies fails what is under way once, and all that comes later at once") {
    Node node;
    if (is_real()) return;
    for (auto [direct, nth] : {std::pair{false, 1},
                               {false, 2},
                               {false, 5},
                               {false, 9},
                               {false, 14},
                               {true, 1},
                               {true, 2},
                               {true, 5}}) {
        CAPTURE(direct);
        CAPTURE(nth);
        Bed bed(Policy::kLate);
        {
            Random random(81);
            Client client(node.options());
            REQUIRE(client.connect());
            Cache cache(bed);
            std::shared_ptr<DeviceKv> kv = cache.open(direct ? kDirect : kSmall);
            Objects objects(kShape, 'd');
            cache.write(random);
            Mark computed = must(kv->mark(cache.stream()));
            must(save(*kv, client, objects, computed));
            soft_device().soft_die(nth, 700);
            LoadReport report = load(*kv, client, objects, kShape.heads, nullptr);
            CHECK_FALSE(all_ok(report));
            CHECK(report.error.find("700") != std::string::npos);
            CHECK(kv->lost() != "");
            for (int i = 0; i < 3; ++i) {
                LoadReport later = load(*kv, client, objects, kShape.heads, nullptr);
                CHECK(later.bytes == 0);
                CHECK(later.error == kv->lost());
                Objects more(kShape, 'e');
                CHECK_FALSE(save(*kv, client, more, nullptr).ok());
            }
            REQUIRE(client.remove(objects.views()));
        }
        bed.forget();
    }
}

TEST_CASE("device kv: a card that hangs keeps a load until close(), which has an end") {
    Node node;
    if (is_real()) return;
    for (const DeviceKvOptions& options : {kSmall, kTight, kDirect}) {
        Bed bed(Policy::kLate);
        {
            Random random(82);
            Client client(node.options());
            REQUIRE(client.connect());
            Cache cache(bed);
            std::shared_ptr<DeviceKv> kv = cache.open(options);
            Objects objects(kShape, 'h');
            cache.write(random);
            Mark computed = must(kv->mark(cache.stream()));
            must(save(*kv, client, objects, computed));
            auto calls = [] {
                return soft_device().soft_calls("cuMemcpyAsync") +
                       soft_device().soft_calls("cuMemcpyBatchAsync");
            };
            int copies = calls();
            soft_device().soft_hang(1);
            std::future<LoadReport> loading = std::async(
                std::launch::async, [&] { return load(*kv, client, objects, kShape.heads, nullptr); });
            while (calls() == copies) std::this_thread::yield();
            CHECK(loading.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
            Status closed = kv->close(50);
            CHECK_FALSE(closed.ok());
            CHECK(closed.error().code == Code::kTimeout);
            LoadReport report = loading.get();
            CHECK_FALSE(all_ok(report));
            CHECK(report.error != "");
            soft_device().soft_unhang();
            soft_device().soft_settle();
        }
        bed.forget();
    }
}

TEST_CASE("device kv: a child of fork() leaves the lanes to its parent, whatever they do") {
    Node node;
    if (is_real()) return;
    Bed bed(Policy::kLate);
    {
        Random random(84);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache cache(bed);
        std::shared_ptr<DeviceKv> kv = cache.open(kSmall);
        Objects objects(kShape, 'c');
        cache.write(random);
        Mark computed = must(kv->mark(cache.stream()));
        must(save(*kv, client, objects, computed));  // its lane sleeps again, or is about to
        pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            ::alarm(20);  // a child that waits for the parent's threads is killed
            bool closed = kv->close(1000).ok();
            kv.reset();
            ::_exit(closed ? 0 : 1);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(status == 0);
        CHECK(all_ok(load(*kv, client, objects, kShape.heads, computed)));
        REQUIRE(client.remove(objects.views()));
    }
    bed.end();
}

TEST_CASE("device kv: what cannot be opened is refused in a sentence") {
    if (is_real()) return;
    Bed bed(Policy::kLate);
    {
        Cache cache(bed);
        PartTable on_card = cache.table();
        // Memory of the host, named as a card's.
        std::vector<char> host(4096);
        PartTable of_host({{{reinterpret_cast<uint64_t>(host.data()), 512, 512}}});
        auto refused = DeviceKv::open(0, of_host, 2, kSmall);
        REQUIRE_FALSE(refused.ok());
        CHECK(refused.error().text.find("does not lie in memory of device 0") != std::string::npos);
        // More blocks than the allocation has.
        CHECK_FALSE(DeviceKv::open(0, on_card, kShape.blocks * 10000, kSmall).ok());
        CHECK_FALSE(DeviceKv::open(7, on_card, kShape.blocks, kSmall).ok());
        CHECK_FALSE(DeviceKv::open(0, on_card, 0, kSmall).ok());
        std::vector<uint32_t> blocks(kShape.heads, kShape.blocks);
        blocks.back() = 0;
        CHECK_FALSE(DeviceKv::open(0, on_card, blocks, kSmall).ok());
        blocks.back() = kShape.blocks * 10000;
        CHECK_FALSE(DeviceKv::open(0, on_card, blocks, kSmall).ok());
        blocks.pop_back();
        CHECK_FALSE(DeviceKv::open(0, on_card, blocks, kSmall).ok());
        // No pinned memory, and no memory on the card.
        soft_device().soft_limit(UINT64_MAX, 0);
        CHECK_FALSE(DeviceKv::open(0, on_card, kShape.blocks, kSmall).ok());
        soft_device().soft_limit(0, UINT64_MAX);
        CHECK_FALSE(DeviceKv::open(0, on_card, kShape.blocks, kSmall).ok());
        soft_device().soft_limit(UINT64_MAX, UINT64_MAX);

        std::shared_ptr<DeviceKv> kv = cache.open(kSmall);
        Node node;
        Client client(node.options());
        REQUIRE(client.connect());
        std::string_view name = "a name..";
        uint32_t block = kShape.blocks;
        uint16_t column = 0;
        int staged = 0;
        auto saved =
            save_now(*kv, client, {{&name, 1}, {}, 0, {&block, 1}, {&column, 1}, nullptr}, [&] { ++staged; });
        CHECK(staged == 1);
        REQUIRE_FALSE(saved.ok());
        CHECK(saved.error().code == Code::kInvalidArgument);
    }
    bed.end();
}

TEST_CASE("device kv: columns of unlike numbers of blocks") {
    if (is_real()) return;
    static_assert(kShape.heads > 1 && kShape.blocks > 2);
    Node node;
    each_policy([&](Bed& bed) {
        Random random(87);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache cache(bed);
        std::vector<uint32_t> blocks(kShape.heads, kShape.blocks);
        blocks.back() = 2;
        std::shared_ptr<DeviceKv> kv = must(DeviceKv::open(0, cache.table(), blocks, kSmall));
        cache.write(random);
        Mark computed = must(kv->mark(cache.stream()));
        int staged = 0;
        for (uint16_t column = 0; column < kShape.heads; ++column) {
            for (uint32_t block = 0; block <= kShape.blocks; ++block) {
                std::string text = "object " + std::to_string(column * 100 + block);
                std::string_view name = text;
                auto saved = save_now(*kv, client, {{&name, 1}, {}, 0, {&block, 1}, {&column, 1}, computed},
                                      [&] { ++staged; });
                CHECK(saved.ok() == (block < blocks[column]));
                if (!saved.ok()) CHECK(saved.error().code == Code::kInvalidArgument);
                if (saved.ok()) REQUIRE(client.remove({&name, 1}));
            }
        }
        CHECK(staged == static_cast<int>(kShape.heads * (kShape.blocks + 1)));
    });
}

TEST_CASE(
    "device kv: a call of the driver that fails ends loads and saves with its error, and leaks nothing") {
    Node node;
    if (is_real()) return;
    const std::pair<const DeviceKvOptions*, const char*> calls[] = {
        {&kSmall, "cuMemcpyAsync"},     {&kSmall, "cuLaunchKernel"},      {&kSmall, "cuEventRecord"},
        {&kSmall, "cuStreamWaitEvent"}, {&kDirect, "cuMemcpyBatchAsync"}, {&kDirect, "cuEventRecord"}};
    for (auto [options, call] : calls) {
        std::string name = call;
        for (int nth : {1, 2, 3}) {
            CAPTURE(options->direct_row_bytes);
            CAPTURE(name);
            CAPTURE(nth);
            Bed bed(Policy::kLate);
            {
                Random random(83);
                Client client(node.options());
                REQUIRE(client.connect());
                Cache cache(bed);
                std::shared_ptr<DeviceKv> kv = cache.open(*options);
                Objects objects(kShape, 'f');
                cache.write(random);
                Mark computed = must(kv->mark(cache.stream()));
                soft_device().soft_fail(name.c_str(), nth, 1);
                must(save(*kv, client, objects, computed));  // in chunks, of which one was refused
                soft_device().soft_fail(name.c_str(), 0, 0);
                must(save(*kv, client, objects, computed));
                std::vector<unsigned char> truth = cache.host.bytes();
                soft_device().soft_fail(name.c_str(), nth, 1);
                LoadReport report = load(*kv, client, objects, kShape.heads, computed);
                soft_device().soft_fail(name.c_str(), 0, 0);
                // An event that was refused is recorded again: nothing else would tell that copies are over.
                CHECK(all_ok(report) == (name == "cuEventRecord"));
                CHECK((report.error == "") == (name == "cuEventRecord"));
                CHECK(all_ok(load(*kv, client, objects, kShape.heads, computed)));
                CHECK(cache.read() == truth);
                REQUIRE(client.remove(objects.views()));
            }
            bed.end();
        }
    }
}
