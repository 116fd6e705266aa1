#include "device/device.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "base/fd.hpp"
#include "device/outcome.hpp"

namespace moonpool::device {

namespace {

// -1 where the system does not say, as on a machine of one node.
int numa_node_of(const std::string& bus_id) {
    Fd file(::open(("/sys/bus/pci/devices/" + bus_id + "/numa_node").c_str(), O_RDONLY | O_CLOEXEC));
    char text[16] = {};
    if (!file.valid() || ::read(file.get(), text, sizeof(text) - 1) <= 0) return -1;
    return std::atoi(text);
}

// The facts of a card. None of these needs a context, and none is a reason to refuse the card.
DeviceFacts read_facts(const Driver& driver, int ordinal, int handle) {
    DeviceFacts facts;
    facts.ordinal = ordinal;
    auto attribute = [&](int number, int otherwise) {
        int value = 0;
        return driver.cuDeviceGetAttribute(&value, number, handle) == cu::kSuccess ? value : otherwise;
    };
    char text[256] = {};
    if (driver.cuDeviceGetName(text, sizeof(text), handle) == cu::kSuccess) facts.name = text;
    std::memset(text, 0, sizeof(text));
    if (driver.cuDeviceGetPCIBusId(text, sizeof(text), handle) == cu::kSuccess) facts.bus_id = text;
    std::transform(facts.bus_id.begin(), facts.bus_id.end(), facts.bus_id.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    CuUuid uuid{};
    if (driver.cuDeviceGetUuid(&uuid, handle) == cu::kSuccess) {
        std::copy_n(uuid.bytes, facts.uuid.size(), facts.uuid.begin());
    }
    size_t bytes = 0;
    if (driver.cuDeviceTotalMem(&bytes, handle) == cu::kSuccess) facts.bytes = bytes;
    facts.numa_node = attribute(cu::kHostNumaNode, -1);
    if (facts.numa_node < 0) facts.numa_node = numa_node_of(facts.bus_id);
    facts.multiprocessors = attribute(cu::kMultiprocessors, 0);
    facts.copy_engines = attribute(cu::kCopyEngines, 0);
    facts.compute_capability = attribute(cu::kComputeMajor, 0) * 10 + attribute(cu::kComputeMinor, 0);
    facts.registers_read_only = attribute(cu::kReadOnlyHostRegister, 0) != 0;
    facts.orders_nic_writes = attribute(cu::kNicWritesOrdering, 0) >= cu::kNicWritesOrderedForOwner;
    return facts;
}

}  // namespace

Result<std::shared_ptr<Device>> Device::open(int ordinal) {
    Result<const Driver*> driver = Driver::get();
    if (!driver) return driver.error();
    std::shared_ptr<Device> device(new Device(**driver));
    int count = 0;
    if (Status counted = device->check((*driver)->cuDeviceGetCount(&count), "cuDeviceGetCount"); !counted) {
        return counted.error();
    }
    if (ordinal < 0 || ordinal >= count) {
        return Error{Code::kInvalidArgument, "there is no CUDA device " + std::to_string(ordinal) +
                                                 ": this process sees " + std::to_string(count)};
    }
    if (Status found = device->check((*driver)->cuDeviceGet(&device->handle_, ordinal), "cuDeviceGet");
        !found) {
        return found.error();
    }
    device->facts_ = read_facts(**driver, ordinal, device->handle_);
    CuContext* context = nullptr;
    Status retained = device->check((*driver)->cuDevicePrimaryCtxRetain(&context, device->handle_),
                                    "cuDevicePrimaryCtxRetain");
    if (!retained) return retained.error();
    device->context_ = context;
    return device;
}

Result<int> Device::find(const DeviceUuid& uuid) {
    Result<const Driver*> driver = Driver::get();
    if (!driver) return driver.error();
    int count = 0;
    if (int code = (*driver)->cuDeviceGetCount(&count); code != cu::kSuccess) {
        return Error{Code::kUnavailable, "cuDeviceGetCount: " + (*driver)->describe(code)};
    }
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        int handle = 0;
        CuUuid own{};
        if ((*driver)->cuDeviceGet(&handle, ordinal) != cu::kSuccess) continue;
        if ((*driver)->cuDeviceGetUuid(&own, handle) != cu::kSuccess) continue;
        if (std::equal(uuid.begin(), uuid.end(), own.bytes)) return ordinal;
    }
    return Error{Code::kUnavailable,
                 "this process does not see that CUDA device (it sees " + std::to_string(count) + ")"};
}

Device::~Device() {
    if (context_ != nullptr && !in_child()) driver_.cuDevicePrimaryCtxRelease(handle_);
}

Status Device::check(int code, const char* call) const {
    if (code == cu::kSuccess) return success();
    Outcome outcome = outcome_of(code);
    if (outcome == Outcome::kForEver) {
        int none = 0;
        lost_.compare_exchange_strong(none, code, std::memory_order_relaxed);
    }
    return Error{code_of(outcome), std::string(call) + ": " + driver_.describe(code)};
}

OnDevice::OnDevice(const Device& device) : device_(device), status_(success()) {
    if (device.in_child()) {
        status_ = Error{Code::kForked, "this handle of a CUDA device belongs to the parent process"};
        return;
    }
    status_ = device.check(device.driver_.cuCtxPushCurrent(device.context_), "cuCtxPushCurrent");
    entered_ = status_.ok();
    if (!entered_) return;
    // Exchanged: it holds the thread's own mode afterwards. A mode that cannot be set leaves the default one,
    // under which calls still work.
    if (device.driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_) != cu::kSuccess) {
        capture_mode_ = cu::kCaptureModeGlobal;
    }
}

OnDevice::~OnDevice() {
    if (!entered_) return;
    device_.driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
    CuContext* popped = nullptr;
    device_.driver_.cuCtxPopCurrent(&popped);
}

}  // namespace moonpool::device
