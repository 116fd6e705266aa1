#include "device/objects_kernel.hpp"

#include <string>
#include <utility>

#include "device/kernels/objects_ptx.hpp"

namespace moonpool::device {

namespace {

constexpr int kComputeCapabilityMin = 70;

}  // namespace

ObjectsKernel::ObjectsKernel(std::shared_ptr<const Device> device, CuModule* module, CuFunction* function)
    : device_(std::move(device)), module_(module), function_(function) {}

Result<ObjectsKernel> ObjectsKernel::load(std::shared_ptr<const Device> device) {
    if (int capability = device->facts().compute_capability; capability < kComputeCapabilityMin) {
        return Error{Code::kUnavailable, "the CUDA device is of compute capability " +
                                             std::to_string(capability / 10) + "." +
                                             std::to_string(capability % 10) + ", and the kernel needs 7.0"};
    }
    OnDevice here(*device);
    if (!here) return here.error();
    const Driver& driver = device->driver();
    char log[1024] = {};
    int options[] = {cu::kJitErrorLog, cu::kJitErrorLogBytes};
    void* values[] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
    CuModule* module = nullptr;
    Status loaded = device->check(driver.cuModuleLoadDataEx(&module, kObjectsPtx, 2, options, values),
                                  "cuModuleLoadDataEx");
    if (!loaded) {
        return Error{Code::kUnavailable, loaded.error().text + (log[0] != 0 ? std::string(": ") + log : "")};
    }
    CuFunction* function = nullptr;
    Status found = device->check(driver.cuModuleGetFunction(&function, module, "moonpool_objects"),
                                 "cuModuleGetFunction");
    if (!found) {
        driver.cuModuleUnload(module);
        return Error{Code::kUnavailable, found.error().text};
    }
    return ObjectsKernel(std::move(device), module, function);
}

ObjectsKernel::ObjectsKernel(ObjectsKernel&& other) noexcept
    : device_(std::move(other.device_)),
      module_(std::exchange(other.module_, nullptr)),
      function_(std::exchange(other.function_, nullptr)) {}

ObjectsKernel::~ObjectsKernel() {
    if (module_ == nullptr) return;
    if (OnDevice here(*device_); here) device_->driver().cuModuleUnload(module_);
}

Status ObjectsKernel::launch(Stream& stream, const ObjectsJob& job, uint32_t blocks, uint32_t threads) const {
    if (job.count == 0) return success();
    if (job.split == 0 || blocks == 0 || threads == 0 || threads % 32 != 0 || threads > kThreadsMax ||
        uint64_t{job.count} * job.split > INT32_MAX) {
        return Error{Code::kInvalidArgument, "no launch of " + std::to_string(blocks) + " blocks of " +
                                                 std::to_string(threads) + " threads for " +
                                                 std::to_string(job.count) + " objects in " +
                                                 std::to_string(job.split) + " parts"};
    }
    OnDevice here(*device_);
    if (!here) return here.error();
    ObjectsJob copy = job;
    uint32_t load = job.move == Move::kToKv ? 1 : 0;
    void* arguments[] = {&copy.rows,  &copy.begins,  &copy.objects, &copy.count,
                         &copy.split, &copy.staging, &load};
    return device_->check(device_->driver().cuLaunchKernel(function_, blocks, 1, 1, threads, 1, 1, 0,
                                                           stream.handle(), arguments, nullptr),
                          "cuLaunchKernel");
}

}  // namespace moonpool::device
