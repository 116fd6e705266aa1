// ObjectsKernel: the kernel that moves objects between a paged KV cache and a staging buffer of one device
// (kernels/objects.cu says what it does). The driver compiles its PTX text for the card when it is loaded,
// which may take some 10 ms: once for each device.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.hpp"
#include "device/stream.hpp"

namespace moonpool::device {

// As in kernels/objects.cu, and on the device.
struct KvRow {
    uint64_t address = 0;  // in block 0
    uint64_t stride = 0;   // from a block to the next one, bytes
    uint32_t bytes = 0;
    uint32_t offset = 0;  // in the object
};
struct KvObject {
    uint64_t staged = 0;  // offset in the staging buffer
    uint32_t block = 0;
    uint32_t column = 0;  // which rows
};
static_assert(sizeof(KvRow) == 24 && sizeof(KvObject) == 16);

enum class Move { kToStaging, kToKv };

struct ObjectsJob {
    uint64_t rows = 0;     // device address of KvRow[]
    uint64_t begins = 0;   // device address of uint32_t[columns + 1], into rows
    uint64_t objects = 0;  // device address of KvObject[count], all of them within the tables
    uint32_t count = 0;
    uint32_t split = 4;    // warps that share an object
    uint64_t staging = 0;  // device address
    Move move = Move::kToStaging;
};

class ObjectsKernel {
   public:
    static constexpr uint32_t kThreadsMax = 1024;

    // kUnavailable: the card is older than the PTX (compute capability 7.0), or the driver refuses it.
    static Result<ObjectsKernel> load(std::shared_ptr<const Device> device);
    ObjectsKernel(ObjectsKernel&& other) noexcept;
    ~ObjectsKernel();

    // Queues the job. blocks: of `threads`, whole warps and at most kThreadsMax; more of either move more
    // bytes a second, and more blocks take more multiprocessors from the engine. Addresses are not checked: a
    // wrong one ends the context.
    Status launch(Stream& stream, const ObjectsJob& job, uint32_t blocks, uint32_t threads) const;

   private:
    ObjectsKernel(std::shared_ptr<const Device> device, CuModule* module, CuFunction* function);

    std::shared_ptr<const Device> device_;
    CuModule* module_ = nullptr;
    CuFunction* function_ = nullptr;
};

}  // namespace moonpool::device
