// Driver: the CUDA driver of this process as one table of functions. libcuda.so.1 is opened at run time, by
// the first caller that wants a device; nothing is linked, and a process that asks for no device opens
// nothing.
//
//   Driver::get()        for work: opens the library and initialises it. An error is one sentence with the
//                        reason: no driver, one too old, a function that it lacks, no card.
//   Driver::if_loaded()  for questions: the table when some component of the process, an engine's torch for
//                        example, has opened the library; null otherwise. Opens and initialises nothing.
//
// Functions are looked up by name and version through cuGetProcAddress where the driver has it: a name alone
// means another signature in another release (cuMemcpyBatchAsync lost a parameter in CUDA 13). What a table
// may lack is null in it and has a has_...() of its own.
//
// Tables are never freed: streams and events of other threads may still use them. Any thread.
#pragma once

#include <functional>
#include <string>

#include "base/result.hpp"
#include "device/cuda.hpp"

namespace moonpool::device {

// X(name, version of its signature * 1000 + minor * 10, name of the exported symbol, arguments)
#define MOONPOOL_CUDA_NEEDED(X)                                                                          \
    X(cuInit, 2000, cuInit, (unsigned flags))                                                            \
    X(cuGetErrorString, 6000, cuGetErrorString, (int code, const char** text))                           \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount, (int* count))                                            \
    X(cuDeviceGet, 2000, cuDeviceGet, (int* device, int ordinal))                                        \
    X(cuDeviceGetName, 2000, cuDeviceGetName, (char* name, int bytes, int device))                       \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2, (CuUuid * uuid, int device))                           \
    X(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId, (char* id, int bytes, int device))                 \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2, (size_t * bytes, int device))                         \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute, (int* value, int attribute, int device))         \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain, (CuContext * *context, int device))      \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2, (int device))                      \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2, (CuContext * context))                                \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2, (CuContext * *context))                                 \
    X(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange, (int* least, int* greatest))       \
    X(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode, (int* mode))          \
    X(cuPointerGetAttributes, 7000, cuPointerGetAttributes,                                              \
      (unsigned count, int* attributes, void** values, uint64_t address))                                \
    X(cuMemAlloc, 3020, cuMemAlloc_v2, (uint64_t * address, size_t bytes))                               \
    X(cuMemFree, 3020, cuMemFree_v2, (uint64_t address))                                                 \
    X(cuMemHostRegister, 6050, cuMemHostRegister_v2, (void* data, size_t bytes, unsigned flags))         \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister, (void* data))                                      \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync, (uint64_t to, uint64_t from, size_t bytes, CuStream * stream)) \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority,                                      \
      (CuStream * *stream, unsigned flags, int priority))                                                \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2, (CuStream * stream))                                    \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent, (CuStream * stream, CuEvent * event, unsigned flags))  \
    X(cuEventCreate, 2000, cuEventCreate, (CuEvent * *event, unsigned flags))                            \
    X(cuEventDestroy, 4000, cuEventDestroy_v2, (CuEvent * event))                                        \
    X(cuEventRecord, 2000, cuEventRecord, (CuEvent * event, CuStream * stream))                          \
    X(cuEventQuery, 2000, cuEventQuery, (CuEvent * event))                                               \
    X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx,                                                      \
      (CuModule * *module, const void* image, unsigned count, int* options, void** values))              \
    X(cuModuleUnload, 2000, cuModuleUnload, (CuModule * module))                                         \
    X(cuModuleGetFunction, 2000, cuModuleGetFunction,                                                    \
      (CuFunction * *function, CuModule * module, const char* name))                                     \
    X(cuLaunchKernel, 4000, cuLaunchKernel,                                                              \
      (CuFunction * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,       \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream* stream, void** arguments,    \
       void** extra))
#define MOONPOOL_CUDA_OPTIONAL(X)                                                                   \
    X(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync,                                                \
      (uint64_t * to, uint64_t * from, size_t * bytes, size_t count, CuCopyAttributes * attributes, \
       size_t * attribute_begins, size_t attribute_count, size_t * failed, CuStream * stream))      \
    X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle, (CuIpcMemory * handle, uint64_t address))         \
    X(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2,                                             \
      (uint64_t * address, CuIpcMemory handle, unsigned flags))                                     \
    X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle, (uint64_t address))                           \
    X(cuMemGetHandleForAddressRange, 11070, cuMemGetHandleForAddressRange,                          \
      (void* handle, uint64_t address, size_t bytes, int type, unsigned long long flags))

// PTX 7.8, which the kernel is committed in, needs the driver of CUDA 11.8.
inline constexpr int kDriverVersionMin = 11080;

struct Driver {
    int version = 0;  // 12080: it supports CUDA 12.8
#define MOONPOOL_DECLARE(name, version, symbol, arguments) int(*name) arguments = nullptr;
    MOONPOOL_CUDA_NEEDED(MOONPOOL_DECLARE)
    MOONPOOL_CUDA_OPTIONAL(MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE

    bool has_batch_copies() const { return cuMemcpyBatchAsync != nullptr; }
    bool has_ipc() const {
        return cuIpcGetMemHandle != nullptr && cuIpcOpenMemHandle != nullptr &&
               cuIpcCloseMemHandle != nullptr;
    }
    // "an illegal memory access was encountered (CUDA error 700)"
    std::string describe(int code) const;

    static Result<const Driver*> get();
    static const Driver* if_loaded();

    // The address of an exported symbol, or null.
    using Symbols = std::function<void*(const char* name)>;
    static Result<Driver> load(const Symbols& symbols);

    // For tests only: the library that get() and if_loaded() use from now on, "" for libcuda.so.1.
    static void use_library_for_tests(const std::string& path);
};

}  // namespace moonpool::device
