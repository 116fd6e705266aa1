// A card, its facts, and the guard under which a thread calls it.
#include <sys/wait.h>

#include <thread>

#include "bed.hpp"
#include "device/outcome.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::Device;
using device::must;
using device::OnDevice;

TEST_CASE("device: a card's facts") {
    Bed bed;
    const device::DeviceFacts& facts = bed.device->facts();
    CHECK(facts.ordinal == 0);
    CHECK_FALSE(facts.name.empty());
    CHECK(facts.bytes >= 1u << 30);
    CHECK(facts.multiprocessors > 0);
    CHECK(facts.copy_engines > 0);
    CHECK(facts.compute_capability >= 70);
    CHECK(facts.bus_id.size() >= 12);
    CHECK(facts.bus_id.find_first_of("ABCDEF") == std::string::npos);  // as sysfs spells it
    CHECK(std::count(facts.uuid.begin(), facts.uuid.end(), 0) < 16);
    if (!is_real()) {
        CHECK(facts.name == "Soft device");
        CHECK(facts.bus_id == "ffff:a0:00.0");
        CHECK(facts.numa_node == 0);
    }
    MESSAGE("tested on: " << facts.name << ", " << facts.bus_id << ", driver "
                          << bed.device->driver().version);
    bed.end();
}

TEST_CASE("device: a card that is not there is refused by its number") {
    Bed bed;
    for (int ordinal : {-1, 1000}) {
        Result<std::shared_ptr<Device>> none = Device::open(ordinal);
        REQUIRE_FALSE(none);
        CHECK(none.error().code == Code::kInvalidArgument);
        CHECK(none.error().text.find("there is no CUDA device " + std::to_string(ordinal)) == 0);
    }
    bed.end();
}

TEST_CASE("device: the guard gives the thread back its context and its capture mode") {
    Bed bed;
    auto* current = engine_call<int(device::CuContext**)>("cuCtxGetCurrent");
    const device::Driver& driver = bed.device->driver();
    std::thread([&] {  // of an engine, with a mode of its own
        int mode = 1;
        driver.cuThreadExchangeStreamCaptureMode(&mode);
        device::CuContext* context = nullptr;
        {
            OnDevice here(*bed.device);
            CHECK(here);
            current(&context);
            CHECK(context == bed.device->context());
            int inside = device::cu::kCaptureModeRelaxed;
            driver.cuThreadExchangeStreamCaptureMode(&inside);
            CHECK(inside == device::cu::kCaptureModeRelaxed);
        }
        current(&context);
        CHECK(context == nullptr);
        mode = 0;
        driver.cuThreadExchangeStreamCaptureMode(&mode);
        CHECK(mode == 1);
    })
        .join();
    bed.end();
}

TEST_CASE("device: no call of ours breaks the graph capture of an engine's thread") {
    each_policy([](Bed& bed) {
        auto* begin = engine_call<int(device::CuStream*, int)>("cuStreamBeginCapture_v2");
        auto* finish_capture = engine_call<int(device::CuStream*, void**)>("cuStreamEndCapture");
        device::Stream engine =
            device::must(device::Stream::create(bed.device, device::Stream::Priority::kDefault));
        void* graph = nullptr;
        auto captured = [&](const std::function<void()>& meanwhile) {
            {
                OnDevice here(*bed.device);
                REQUIRE(begin(engine.handle(), device::cu::kCaptureModeGlobal) == 0);
            }
            std::thread(meanwhile).join();
            OnDevice here(*bed.device);
            return finish_capture(engine.handle(), &graph);
        };
        CHECK(captured([&] {
                  device::DeviceMemory memory =
                      device::must(device::DeviceMemory::allocate(bed.device, 4096));
                  Pinned host(bed, 4096);
                  copy_now(bed, memory.address(), host.address(), 4096);
              }) == 0);
        // What the guard is for: the same without it.
        if (is_real()) return;
        CHECK(captured([&] {
                  const device::Driver& driver = bed.device->driver();
                  driver.cuCtxPushCurrent(bed.device->context());
                  uint64_t address = 0;
                  CHECK(driver.cuMemAlloc(&address, 4096) == device::cu::kCaptureUnsupported);
                  device::CuContext* popped = nullptr;
                  driver.cuCtxPopCurrent(&popped);
              }) == device::cu::kCaptureInvalidated);
    });
}

TEST_CASE("device: a child of fork() is refused, and takes nothing down with it") {
    Bed bed;
    {
        device::DeviceMemory memory = device::must(device::DeviceMemory::allocate(bed.device, 4096));
        Pinned host(bed, 4096);
        std::shared_ptr<Device> second = must(Device::open(0));
        pid_t child = ::fork();
        if (child == 0) {
            Result<device::Event> event = device::Event::create(bed.device);
            Result<std::shared_ptr<Device>> again = Device::open(0);
            bool refused = !event && event.error().code == Code::kForked && !again &&
                           again.error().code == Code::kForked;
            device::DeviceMemory moved = std::move(memory);  // whose destructor runs here
            { device::DeviceMemory gone = std::move(moved); }
            second.reset();
            bool silent = is_real() || soft_device().soft_calls("cuDevicePrimaryCtxRelease") == 0;
            ::_exit(refused && silent ? 0 : 1);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
        copy_now(bed, memory.address(), host.address(), 4096);
    }
    bed.end();
}

TEST_CASE("device: errors are sorted by what the caller can do") {
    using device::Outcome;
    for (int code : {4, 214, 700, 702, 714, 715, 716, 717, 718, 719}) {
        CHECK(device::outcome_of(code) == Outcome::kForEver);
    }
    for (int code : {1, 800, 801}) CHECK(device::outcome_of(code) == Outcome::kNotAllowed);
    CHECK(device::outcome_of(2) == Outcome::kNoMemory);
    CHECK(device::outcome_of(0) == Outcome::kDone);
    CHECK(device::outcome_of(600) == Outcome::kNotReady);
    for (int code : {101, 201, 701, 999, 12345}) CHECK(device::outcome_of(code) == Outcome::kOther);
    Bed bed;
    CHECK(bed.device->check(0, "cuX"));
    CHECK(bed.device->check(2, "cuX").error().code == Code::kOs);
    CHECK(bed.device->check(801, "cuX").error().code == Code::kInvalidArgument);
    CHECK(bed.device->lost() == 0);
    Status dead = bed.device->check(719, "cuX");
    CHECK(dead.error().code == Code::kUnavailable);
    CHECK(dead.error().text.find("cuX: ") == 0);
    CHECK_FALSE(bed.device->check(700, "cuX"));
    CHECK(bed.device->lost() == 719);  // the first
    bed.end();
}
