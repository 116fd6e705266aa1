// What the tests of DeviceKv share: a node, a KV cache on a card that a stream of an engine writes, and the
// objects in it.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../device/bed.hpp"
#include "../device/kv_cache.hpp"
#include "store/client/client.hpp"
#include "store/device/device_kv.hpp"
#include "store/node/server.hpp"

namespace moonpool::testing {

using device::must;

inline constexpr uint64_t kMiB = 1 << 20;
inline constexpr KvShape kShape{.layers = 2, .heads = 2, .tokens = 4, .blocks = 6, .content = 512};
inline constexpr size_t kNameBytes = 8;

struct Node {
    std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("moonpool-device-kv-" + std::to_string(::getpid()));
    std::unique_ptr<Server> server;

    Node() {
        std::filesystem::create_directories(folder);
        ServerOptions options;
        options.socket_path = folder / "node.sock";
        options.token = "a token";
        PoolOptions pool;
        pool.arena_bytes = 64 * kMiB;
        options.pools = {pool};
        server = must(Server::create(std::move(options)));
        REQUIRE(server->start());
    }
    ~Node() {
        server.reset();
        std::filesystem::remove_all(folder);
    }
    ClientOptions options() const {
        ClientOptions options;
        options.socket_path = folder / "node.sock";
        options.token = "a token";
        options.timeout_ms = 20000;  // sanitizers on a busy machine
        return options;
    }
};

// A KV cache on a card, written by a stream of an engine.
struct Cache {
    Bed& bed;
    KvShape shape;
    device::DeviceMemory memory = must(device::DeviceMemory::allocate(bed.device, shape.bytes()));
    Pinned host{bed, shape.bytes()};  // what the engine writes, or what was read back
    device::Stream engine = must(device::Stream::create(bed.device, device::Stream::Priority::kDefault));

    Cache(Bed& in, KvShape of = kShape) : bed(in), shape(of) {}
    uint64_t stream() const { return reinterpret_cast<uint64_t>(engine.handle()); }
    // Queued only.
    void write(Random& random) {
        host.fill(random);
        REQUIRE(engine.copy({memory.address(), host.address(), shape.bytes()}));
    }
    std::vector<unsigned char> read() {
        copy_now(bed, host.address(), memory.address(), shape.bytes());
        return host.bytes();
    }
    PartTable table() const {
        RowTable rows = row_table(shape, memory.address());
        std::vector<std::vector<StridedRow>> columns(shape.heads);
        for (size_t c = 0; c < shape.heads; ++c) {
            for (uint32_t r = rows.begins[c]; r < rows.begins[c + 1]; ++r)
                columns[c].push_back({rows.rows[r].address, rows.rows[r].stride, rows.rows[r].bytes});
        }
        return PartTable(std::move(columns));
    }
    std::shared_ptr<DeviceKv> open(DeviceKvOptions options) const {
        return must(DeviceKv::open(0, table(), shape.blocks, options));
    }
};

// Slots of one or two objects, so that a job has many chunks.
inline constexpr DeviceKvOptions kSmall{.ring_bytes = 64 << 10, .slot_bytes = 4 << 10, .load_lanes = 2};

// Without the kernel, whatever the rows are: 24 of 512 bytes in 3 objects, a batch of copies.
inline constexpr DeviceKvOptions kDirect{
    .ring_bytes = 64 << 10, .slot_bytes = 12 << 10, .load_lanes = 2, .direct_row_bytes = 1};

// Two slots, for more lanes than that.
inline constexpr DeviceKvOptions kTight{.ring_bytes = 1, .slot_bytes = 4 << 10, .load_lanes = 3};

// All objects of a cache, block by block.
struct Objects {
    std::string names;
    std::vector<uint32_t> blocks;
    std::vector<uint16_t> columns;

    Objects(const KvShape& shape, char tag, uint32_t first_block = 0) {
        for (unsigned i = 0; i < shape.objects(); ++i) {
            std::string name(kNameBytes, '.');
            name[0] = tag;
            name[1] = static_cast<char>('a' + i / 26);
            name[2] = static_cast<char>('a' + i % 26);
            names += name;
            blocks.push_back((i / shape.heads + first_block) % shape.blocks);
            columns.push_back(static_cast<uint16_t>(i % shape.heads));
        }
    }
    std::vector<std::string_view> views() const {
        std::vector<std::string_view> out;
        for (size_t at = 0; at < names.size(); at += kNameBytes)
            out.push_back(std::string_view(names).substr(at, kNameBytes));
        return out;
    }
};

inline std::vector<unsigned char> object_at(const KvShape& shape, const std::vector<unsigned char>& cache,
                                            uint32_t block, uint16_t head) {
    std::vector<unsigned char> object;
    for (unsigned layer = 0; layer < shape.layers; ++layer) {
        for (unsigned token = 0; token < shape.tokens; ++token) {
            const unsigned char* from = cache.data() + shape.at(layer, block, head, token);
            object.insert(object.end(), from, from + shape.content);
        }
    }
    return object;
}

inline Result<PutReport> save_now(DeviceKv& kv, Client& client, DeviceSave save,
                                  std::function<void()> staged) {
    auto over = std::make_shared<std::promise<Result<PutReport>>>();
    std::future<Result<PutReport>> report = over->get_future();
    kv.start_save(client, std::move(save),
                  {.staged = std::move(staged),
                   .ended = [over](Result<PutReport> result) { over->set_value(std::move(result)); }});
    return report.get();
}

inline Result<PutReport> save(DeviceKv& kv, Client& client, const Objects& objects, Mark after,
                              int* staged = nullptr) {
    std::vector<std::string_view> names = objects.views();
    std::atomic<int> calls{0};
    auto report = save_now(kv, client, {names, {}, 0, objects.blocks, objects.columns, std::move(after)},
                           [&] { ++calls; });
    CHECK(calls == 1);
    if (staged != nullptr) *staged = calls;
    return report;
}

inline LoadReport load(
    DeviceKv& kv, Client& client, const Objects& objects, uint32_t width, Mark after,
    const std::function<void()>& pinned = [] {}) {
    std::vector<std::string_view> names = objects.views();
    Prefix prefix = must(client.longest_prefix(names, width, true));
    REQUIRE(prefix.descriptors.size() == names.size());
    Handover handover = Client::hand_over(prefix);
    pinned();
    return kv.load(client, {handover.holders, handover.descriptors, objects.blocks, objects.columns, false,
                            std::move(after)});
}

inline bool all_ok(const LoadReport& report) {
    return std::ranges::all_of(report.ok, [](uint8_t ok) { return ok == 1; });
}

}  // namespace moonpool::testing
