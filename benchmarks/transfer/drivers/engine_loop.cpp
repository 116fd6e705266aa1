// The transfer engine itself, in C++: writes of 64 bytes over the software libibverbs of the tests, by one
// caller and by two, beside the plain loop of verbs_loop.cpp over the same library. All of it lives in this
// process.
//
//     engine_loop LIBRARY ROUNDS CALLS
//
// Prints a line for each measurement: what was measured, and nanoseconds for each slice.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.hpp"

using namespace moonpool;
using transport::Direction;
using transport::Slice;

namespace {

constexpr uint64_t kBytes = 64;
constexpr size_t kBatch = 128;
constexpr int kParts = 50;  // of a round of one thread: most are shorter than what else runs on the machine
constexpr uint64_t kMemoryBytes = 2 * kBatch * kBytes;  // of one engine; each caller has a half

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "engine_loop: %s\n", why.c_str());
    std::exit(1);
}

template <class Value>
Value take(Result<Value> result) {
    if (!result) fail(result.error().text);
    return std::move(*result);
}

struct Node {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<transport::Memory> memory;

    Node(const std::string& name, const std::string& library) {
        EngineOptions options;
        options.name = name;
        options.listen = {"127.0.0.1:0"};
        options.token = "of this benchmark only";
        options.transports = std::vector<std::string>{"rdma"};
        options.rdma.library = library;
        engine = take(Engine::create(options));
        for (const auto& [transport, why] : engine->transports()) {
            if (transport == "rdma" && !why.empty()) fail(why);
        }
        memory = take(engine->allocate(kMemoryBytes, "cpu:0"));
    }
    uint32_t open(const Node& peer) const { return take(engine->open(peer.engine->addresses().front())); }
    uint64_t address() const { return reinterpret_cast<uint64_t>(memory->data()); }
};

// What one thread writes again and again.
class Caller {
   public:
    // segment: that of `there`, in `here`.
    Caller(Node& here, const Node& there, uint32_t segment, size_t half, size_t batch)
        : here_(here), segment_(segment) {
        for (size_t i = 0; i < batch; ++i) {
            uint64_t at = (half * kBatch + i) * kBytes;
            slices_.push_back({here.address() + at, there.address() + at, kBytes, Direction::kWrite});
        }
    }
    void run(int calls) {
        TransferRequest request;
        request.segments = {&segment_, 1};
        request.slices = slices_;
        for (int i = 0; i < calls; ++i) {
            Result<uint64_t> moved = here_.engine->transfer(request);
            if (!moved) fail(moved.error().text);
        }
    }
    size_t slices() const { return slices_.size(); }

   private:
    Node& here_;
    uint32_t segment_;
    std::vector<Slice> slices_;
};

double seconds(const auto& body) {
    auto began = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void print(const char* name, double taken_s, int calls, size_t slices) {
    std::printf("%s %.1f\n", name, taken_s * 1e9 / calls / static_cast<double>(slices));
}

void measure(const char* name, Caller& caller, int calls) {
    print(name, seconds([&] { caller.run(calls); }), calls, caller.slices());
}

// Both make `calls`; a slice of either counts.
void measure(const char* name, std::array<Caller*, 2> callers, int calls) {
    double taken_s = seconds([&] {
        std::thread other([&] { callers[1]->run(calls); });
        callers[0]->run(calls);
        other.join();
    });
    print(name, taken_s, calls, callers[0]->slices() + callers[1]->slices());
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) fail("engine_loop LIBRARY ROUNDS CALLS");
    const std::string library = words[1];
    const int rounds = std::atoi(words[2]), calls = std::atoi(words[3]);
    void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) fail(::dlerror());
    auto loop = reinterpret_cast<double (*)(int, int, int)>(::dlsym(opened, "verbs_loop"));
    if (loop == nullptr) fail(::dlerror());
    Node here("here", library), there("there", library), third("third", library);
    std::span<std::byte> mine(here.memory->data(), kMemoryBytes);
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<std::byte>(i * 7 + i / 256);
    const uint32_t segment = here.open(there);
    Caller batch(here, there, segment, 0, kBatch), alone(here, there, segment, 0, 1);
    Caller beside(here, there, segment, 1, kBatch), elsewhere(here, third, here.open(third), 1, kBatch);
    for (Caller* caller : {&batch, &alone, &beside, &elsewhere}) caller->run(10);  // connects
    auto plain = [&](const char* name, int slices, int times) {
        double taken_s = loop(slices, static_cast<int>(kBytes), times);
        if (taken_s < 0) fail("the plain loop failed");
        print(name, taken_s, times, static_cast<size_t>(slices));
    };
    // What the machine has for a second thread: each has a connection of its own, and nothing in common.
    auto plain_twice = [&] {
        double other_s = 0;
        std::thread other([&] { other_s = loop(kBatch, static_cast<int>(kBytes), 64 * calls); });
        double taken_s = std::max(loop(kBatch, static_cast<int>(kBytes), 64 * calls), 0.0);
        other.join();
        print("two-plain", std::max(taken_s, other_s), 64 * calls, 2 * kBatch);
    };
    for (int round = 0; round < rounds; ++round) {  // in turn: all see the same machine
        for (int part = 0; part < kParts; ++part) {
            measure("batch", batch, calls / kParts);
            plain("batch-plain", kBatch, 2 * calls / kParts);
            measure("alone", alone, 20 * calls / kParts);
            plain("alone-plain", 1, 40 * calls / kParts);
        }
        plain_twice();
        measure("two-peers", {&batch, &elsewhere}, 8 * calls);
        measure("one-peer", {&batch, &beside}, 8 * calls);
    }
    auto same = [&](const Node& node, size_t from, size_t bytes) {
        return std::ranges::equal(mine.subspan(from, bytes), std::span(node.memory->data() + from, bytes));
    };
    if (!same(there, 0, kMemoryBytes) || !same(third, kMemoryBytes / 2, kMemoryBytes / 2)) {
        fail("the peers have other bytes");
    }
    return 0;
}
