// A save and a load in which each call fails once in each place with each sort of error, in which the card
// dies or hangs at each operation. And the proof that the software device sees: mistakes planted in it are
// found.
#include <map>

#include "bed.hpp"
#include "scenario.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr Policy kPolicies[] = {Policy::kLate, Policy::kEarly, Policy::kAtOnce, Policy::kShuffled};

bool is_found(Way way, Mistake mistake, Policy policy, uint64_t seed) {
    Bed bed(policy, seed);
    Result<bool> right = Scenario({mistake}, 10000, way).run(bed.device);
    char text[200];
    soft_device().soft_settle();
    bool found = !right || !*right || soft_device().soft_violations(text, sizeof(text)) != 0;
    bed.forget();
    return found;
}

// What cannot be given back, or of which it is not known whether a card still uses it, is kept.
bool may_keep(const std::string& name) {
    return name.find("cuEvent") == 0 || name.find("Free") != std::string::npos ||
           name.find("Destroy") != std::string::npos || name.find("Unregister") != std::string::npos ||
           name.find("Unload") != std::string::npos || name.find("Release") != std::string::npos ||
           name.find("cuCtx") == 0;
}

}  // namespace

TEST_CASE("device: a save and a load keep every byte, under every policy") {
    for (int i = 0; i < 5; ++i) {
        for (Way way : {Way::kKernel, Way::kDirect}) {
            each_policy([&](Bed& bed) { CHECK(device::must(Scenario({}, 10000, way).run(bed.device))); });
        }
    }
}

TEST_CASE("device: a mistake that is planted is found by the policies that can" * doctest::skip(kUnderTsan)) {
    if (is_real()) return;
    constexpr int kRuns = 3, kShuffledRuns = 30;
    struct Row {
        Way way;
        Mistake mistake;
        const char* name;
        bool late, early;  // found in every run, or in none
    };
    const Row rows[] = {
        {Way::kKernel, Mistake::kSaveDoesNotWait, "a save does not wait for the forward", true, true},
        {Way::kKernel, Mistake::kLoadDoesNotWait, "a load does not wait for earlier writes", true, true},
        {Way::kKernel, Mistake::kSourceAtAnyTime, "a source that a kernel writes is read at any time", false,
         true},
        {Way::kKernel, Mistake::kEndBeforeCopy, "a save ends before its copies", true, true},
        {Way::kKernel, Mistake::kEndBeforeKernel, "a load ends before its kernels", true, true},
        {Way::kKernel, Mistake::kSlotWithoutStream, "a slot is free while a copy reads it", true, true},
        {Way::kKernel, Mistake::kKernelBeforeCopy, "a kernel does not wait for its copy", true, true},
        {Way::kKernel, Mistake::kHalfOverwritten, "a copy does not wait for the kernel before", false, false},
        {Way::kKernel, Mistake::kEndNotAwaited, "a save reads its slots at once", true, true},
        {Way::kDirect, Mistake::kSaveDoesNotWait, "rows: a save does not wait for the forward", true, true},
        {Way::kDirect, Mistake::kLoadDoesNotWait, "rows: a load does not wait for earlier writes", true,
         true},
        {Way::kDirect, Mistake::kSourceAtAnyTime, "rows: blocks are read at any time", false, true},
        {Way::kDirect, Mistake::kEndBeforeCopy, "rows: a save ends before its copies", true, true},
        {Way::kDirect, Mistake::kEndBeforeKernel, "rows: a load ends before its copies", true, true},
        // Early: the slot was read when the copies were queued, as it may be.
        {Way::kDirect, Mistake::kSlotWithoutStream, "rows: a slot is free while a copy reads it", true,
         false},
        {Way::kDirect, Mistake::kEndNotAwaited, "rows: a save reads its slots at once", true, true},
    };
    Random random(2341);
    for (const Row& row : rows) {
        std::map<Policy, int> found;
        for (Policy policy : kPolicies) {
            int runs = policy == Policy::kShuffled ? kShuffledRuns : kRuns;
            for (int i = 0; i < runs; ++i)
                found[policy] += is_found(row.way, row.mistake, policy, random.next());
        }
        MESSAGE(std::string(row.name)
                << ": late " << found[Policy::kLate] << ", early " << found[Policy::kEarly] << ", at once "
                << found[Policy::kAtOnce] << " of " << kRuns << ", shuffled " << found[Policy::kShuffled]
                << " of " << kShuffledRuns);
        CHECK(found[Policy::kLate] == (row.late ? kRuns : 0));
        CHECK(found[Policy::kEarly] == (row.early ? kRuns : 0));
        CHECK(found[Policy::kAtOnce] == 0);
        CHECK(found[Policy::kShuffled] > 0);
    }
}

TEST_CASE("device: each call fails once in each place, and nothing is wrong, lost or left") {
    if (is_real()) return;
    Random random(2342);
    std::map<std::string, int> calls;
    {
        Bed bed;
        CHECK(device::must(Scenario().run(bed.device)));
        for (int i = 0; i < soft_device().soft_functions(); ++i) {
            const char* name = soft_device().soft_function(i);
            calls[name] = soft_device().soft_calls(name);
        }
        bed.end();
    }
    int runs = 0, poorer = 0;
    for (auto& [name, count] : calls) {
        if (name == "cuInit" || name == "cuDeviceGetCount" || name == "cuDeviceGet" ||
            name == "cuDevicePrimaryCtxRetain") {
            continue;  // of Device::open(), below
        }
        for (int nth = 1; nth <= count;
             nth += count > 6 ? static_cast<int>(random.between(1, count / 3)) : 1) {
            for (int code : {device::cu::kInvalidValue, device::cu::kOutOfMemory, device::cu::kNotSupported,
                             device::cu::kIllegalAddress}) {
                CAPTURE(name);
                CAPTURE(nth);
                CAPTURE(code);
                Bed bed(Policy::kLate, random.next());
                soft_device().soft_fail(name.c_str(), nth, code);
                Result<bool> right = Scenario().run(bed.device);
                if (right) CHECK(*right);
                if (!right) CHECK_FALSE(right.error().text.empty());
                ++runs;
                poorer += right.ok();
                if (code == device::cu::kIllegalAddress || may_keep(name)) {
                    char text[200];
                    bed.device.reset();
                    soft_device().soft_settle();
                    CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
                    bed.forget();
                } else {
                    bed.end();
                }
            }
        }
    }
    MESSAGE(runs << " runs with a call that fails, of which " << poorer << " took a poorer path");
    for (const char* name : {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"}) {
        soft_device().soft_reset(0, 1);
        device::Driver::use_library_for_tests(soft_library());
        soft_device().soft_fail(name, 1, device::cu::kOutOfMemory);
        Result<std::shared_ptr<device::Device>> none = device::Device::open(0);
        REQUIRE_FALSE(none);
        CHECK(none.error().text.find("(CUDA error 2)") != std::string::npos);
        char text[200];
        CHECK_MESSAGE(soft_device().soft_live(text, sizeof(text)) == 0, text);
    }
}

TEST_CASE(
    "device: a card that dies or hangs at any operation is told, and writes to no memory that was given "
    "back") {
    if (is_real()) return;
    Random random(2343);
    int died = 0, hung = 0;
    for (Policy policy : kPolicies) {
        for (int nth = 1; nth < 60; nth += static_cast<int>(random.between(1, 8))) {
            std::string run = name_of(policy);
            CAPTURE(run);
            CAPTURE(nth);
            {
                Bed bed(policy, random.next());
                soft_device().soft_die(nth, 719);
                Result<bool> right = Scenario().run(bed.device);
                if (right) CHECK(*right);
                if (!right) {
                    ++died;
                    CHECK(bed.device->lost() == 719);
                    CHECK(right.error().code == Code::kUnavailable);
                }
                bed.forget();
            }
            Bed bed(policy, random.next());
            soft_device().soft_hang(nth);
            Result<bool> right = Scenario({}, 5).run(bed.device);
            if (right) CHECK(*right);
            if (!right) {
                ++hung;
                CHECK(right.error().code == Code::kTimeout);
            }
            soft_device().soft_unhang();
            soft_device().soft_settle();  // at last: into memory that is still there
            char text[200];
            CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
            bed.forget();
        }
    }
    MESSAGE(died << " runs died, " << hung << " hung");
    CHECK(died > 0);
    CHECK(hung > 0);
}
