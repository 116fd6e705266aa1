// A bed for the tests of core/csrc/device: a card of the software device under one policy after another, or
// the real card 0 of this machine when MOONPOOL_TEST_DEVICE=real. A bed's end checks that no program's rule
// was broken and that everything was given back.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../random.hpp"
#include "../sanitizer.hpp"
#include "device/device.hpp"
#include "device/device_memory.hpp"
#include "device/event.hpp"
#include "device/pinned_memory.hpp"
#include "device/stream.hpp"
#include "soft/soft.hpp"

namespace moonpool::device {

// doctest prints a value of a Result's.
template <class T>
T must(Result<T> result, const char* what = "") {
    REQUIRE_MESSAGE(result.ok(), what << (result.ok() ? "" : result.error().text));
    return std::move(*result);
}

}  // namespace moonpool::device

namespace moonpool::testing {

using soft::Policy;

inline bool is_real() {
    const char* chosen = std::getenv("MOONPOOL_TEST_DEVICE");
    return chosen != nullptr && std::strcmp(chosen, "real") == 0;
}

inline std::string soft_library() {
    char self[4096] = {};
    REQUIRE(::readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    std::string path = self;
    return path.substr(0, path.rfind('/')) + "/libsoftcuda.so";
}

struct Soft {
    void* library = ::dlopen(soft_library().c_str(), RTLD_NOW | RTLD_LOCAL);
#define MOONPOOL_DECLARE(result, name, arguments) \
    result(*name) arguments = reinterpret_cast<result(*) arguments>(::dlsym(library, #name));
    MOONPOOL_SOFT_CONTROLS(MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE
};
inline Soft& soft_device() {
    static Soft controls;
    REQUIRE(controls.library != nullptr);
    return controls;
}

// A function of the driver that the core does not use and an engine does.
template <class Function>
Function* engine_call(const char* name) {
    void* library = is_real() ? ::dlopen("libcuda.so.1", RTLD_NOW) : soft_device().library;
    void* found = ::dlsym(library, name);
    REQUIRE_MESSAGE(found != nullptr, name);
    return reinterpret_cast<Function*>(found);
}

inline const char* name_of(Policy policy) {
    const char* names[] = {"late", "early", "at once", "shuffled"};
    return names[static_cast<int>(policy)];
}

class Bed {
   public:
    explicit Bed(Policy policy = Policy::kLate, uint64_t seed = 1) {
        device::Driver::use_library_for_tests(is_real() ? "" : soft_library());
        if (!is_real()) soft_device().soft_reset(static_cast<int>(policy), seed);
        device = device::must(device::Device::open(0));
    }
    // live_expected: what a card that hangs keeps.
    void end(int live_expected = 0) {
        device.reset();
        if (is_real()) return;
        char text[200];
        soft_device().soft_settle();
        int violations = soft_device().soft_violations(text, sizeof(text));
        CHECK_MESSAGE(violations == 0, text);
        int live = soft_device().soft_live(text, sizeof(text));
        CHECK_MESSAGE(live == live_expected, text);
    }
    // In place of end(), where a rule was broken on purpose.
    void forget() {
        device.reset();
        soft_device().soft_reset(0, 1);
    }

    std::shared_ptr<device::Device> device;
};

// The body on each policy, the shuffled one with several seeds; on the real card once.
inline void each_policy(const std::function<void(Bed&)>& body) {
    Random random(2300);
    std::vector<std::pair<Policy, uint64_t>> runs{{Policy::kLate, 1}};
    if (!is_real()) {
        runs = {{Policy::kLate, random.next()},
                {Policy::kEarly, random.next()},
                {Policy::kAtOnce, random.next()}};
        for (int i = 0; i < 4; ++i) runs.emplace_back(Policy::kShuffled, random.next());
    }
    for (auto [policy, seed] : runs) {
        std::string run = std::string(name_of(policy)) + ", seed " + std::to_string(seed);
        CAPTURE(run);
        Bed bed(policy, seed);
        body(bed);
        bed.end();
    }
}

// Bytes of the host that a card reaches.
class Pinned {
   public:
    Pinned(Bed& bed, size_t bytes)
        : memory_(device::must(device::PinnedMemory::allocate(bed.device, (bytes + 4095) & ~size_t{4095}))),
          bytes_(bytes) {}
    unsigned char* data() { return reinterpret_cast<unsigned char*>(memory_.data()); }
    uint64_t address() const { return reinterpret_cast<uint64_t>(memory_.data()); }
    size_t size() const { return bytes_; }
    void fill(Random& random) { random.fill(data(), bytes_); }
    std::vector<unsigned char> bytes() { return {data(), data() + bytes_}; }

   private:
    device::PinnedMemory memory_;
    size_t bytes_;
};

// Waits for all that was queued on a stream.
inline void finish(Bed& bed, device::Stream& stream) {
    device::Event event = device::must(device::Event::create(bed.device));
    REQUIRE(event.record(stream.handle()));
    REQUIRE(device::must(event.wait(10000)));
}

inline void copy_now(Bed& bed, uint64_t to, uint64_t from, uint64_t bytes) {
    device::Stream stream =
        device::must(device::Stream::create(bed.device, device::Stream::Priority::kDefault));
    REQUIRE(stream.copy({to, from, bytes}));
    finish(bed, stream);
}

}  // namespace moonpool::testing
