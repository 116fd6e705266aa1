// The driver: its functions by name and version; and the controls of the tests.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "call.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

extern "C" int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t, int*);

namespace {

struct Function {
    const char* name;
    int since;
    const char* symbol;
};
const Function kFunctions[] = {
    {"cuInit", 2000, "cuInit"},
    {"cuGetErrorString", 6000, "cuGetErrorString"},
    {"cuDeviceGetCount", 2000, "cuDeviceGetCount"},
    {"cuDeviceGet", 2000, "cuDeviceGet"},
    {"cuDeviceGetName", 2000, "cuDeviceGetName"},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute"},
    {"cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain"},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxGetStreamPriorityRange", 5050, "cuCtxGetStreamPriorityRange"},
    {"cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"},
    {"cuPointerGetAttributes", 7000, "cuPointerGetAttributes"},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000, "cuMemHostUnregister"},
    {"cuMemcpyAsync", 4000, "cuMemcpyAsync"},
    {"cuStreamCreateWithPriority", 5050, "cuStreamCreateWithPriority"},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamWaitEvent", 3020, "cuStreamWaitEvent"},
    {"cuEventCreate", 2000, "cuEventCreate"},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    {"cuEventRecord", 2000, "cuEventRecord"},
    {"cuEventQuery", 2000, "cuEventQuery"},
    {"cuModuleLoadDataEx", 2010, "cuModuleLoadDataEx"},
    {"cuModuleUnload", 2000, "cuModuleUnload"},
    {"cuModuleGetFunction", 2000, "cuModuleGetFunction"},
    {"cuLaunchKernel", 4000, "cuLaunchKernel"},
    {"cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync"},
    {"cuIpcGetMemHandle", 4010, "cuIpcGetMemHandle"},
    {"cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"},
    {"cuIpcCloseMemHandle", 4010, "cuIpcCloseMemHandle"},
    {"cuMemGetHandleForAddressRange", 11070, "cuMemGetHandleForAddressRange"},
};

// This library. Opened once: TSan reads all mappings of the process whenever a library is opened.
void* self() {
    static void* const handle = [] {
        Dl_info info;
        ::dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info);
        return ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return handle;
}

}  // namespace

extern "C" {

// Version 13 of the batch is another function, which a caller of ours may not get.
int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t, int*) {
    Call call("cuGetProcAddress");
    if (call.code != 0) return call.code;
    *found = nullptr;
    for (const Function& function : kFunctions) {
        if (std::strcmp(function.name, name) != 0 || state().hidden_names.count(name) != 0) continue;
        if (version < function.since || version > state().version) continue;
        if (std::strcmp(name, "cuMemcpyBatchAsync") == 0 && version >= 13000) continue;
        *found = ::dlsym(self(), function.symbol);
    }
    return *found != nullptr ? 0 : cu::kNotFound;
}

void soft_reset(int policy, uint64_t seed) {
    std::lock_guard lock(state().mutex);
    state().reset(static_cast<Policy>(policy), seed);
}
void soft_set_cards(int cards) { state().cards = cards; }
void soft_set_first_card(int card) { state().first_card = card; }
void soft_owner_ended(int code) { state().owner_ended = code; }
void soft_set_version(int version) { state().version = version; }
void soft_set_capability(int capability) { state().capability = capability; }
void soft_hide(const char* name) { state().hidden_names.insert(name); }
void soft_limit(uint64_t card_bytes, uint64_t pinned_bytes) {
    state().card_limit = card_bytes;
    state().pinned_limit = pinned_bytes;
}
void soft_fail(const char* name, int nth, int code) { state().failures[name] = {nth, code}; }
void soft_refuse(const char* name, int code) {
    std::lock_guard lock(state().mutex);
    state().refusals[name] = code;
}
void soft_hang(int nth) { state().hang_in = nth; }
void soft_unhang() {
    std::lock_guard lock(state().mutex);
    state().hang_in = 0;
    for (auto& stream : state().all_streams) {
        for (Operation& operation : stream->queue) operation.hangs = false;
    }
}
void soft_die(int nth, int code) {
    state().die_in = nth;
    state().die_code = code;
}
int soft_calls(const char* name) {
    std::lock_guard lock(state().mutex);
    return state().calls[name];
}
int soft_functions() { return static_cast<int>(std::size(kFunctions)); }
const char* soft_function(int number) { return kFunctions[number].name; }
void soft_settle() {
    std::lock_guard lock(state().mutex);
    state().settle();
}
int soft_violations(char* text, size_t bytes) {
    std::lock_guard lock(state().mutex);
    std::snprintf(text, bytes, "%s", state().first_violation.c_str());
    return state().violations;
}
int soft_live(char* text, size_t bytes) {
    std::lock_guard lock(state().mutex);
    State& s = state();
    int contexts = 0;
    for (const Context& context : s.contexts) contexts += context.retained;
    std::snprintf(text, bytes,
                  "%d contexts, %zu streams, %zu events, %zu modules, %zu allocations, %zu pinned", contexts,
                  s.streams.size(), s.events.size(), s.modules.size(), s.card_memory.size(),
                  s.host_memory.size());
    return contexts + static_cast<int>(s.streams.size() + s.events.size() + s.modules.size() +
                                       s.card_memory.size() + s.host_memory.size());
}
uint64_t soft_adopt(void* data, size_t bytes) {
    std::lock_guard lock(state().mutex);
    // A memfd takes the place of its pages, with the same bytes, so that other processes can open it.
    auto begin = reinterpret_cast<uint64_t>(data) & ~uint64_t{4095};
    uint64_t offset = reinterpret_cast<uint64_t>(data) - begin;
    CardMemory memory{.bytes = (offset + bytes + 4095) / 4096 * 4096,
                      .hidden = reinterpret_cast<char*>(begin)};
    auto mapped = static_cast<off_t>(CardMemory::mapped(memory.bytes));
    memory.fd = ::memfd_create("soft-device", MFD_CLOEXEC);
    bool kept = memory.fd >= 0 && ::ftruncate(memory.fd, mapped) == 0;
    for (uint64_t at = 0; kept && at < memory.bytes;) {
        ssize_t n = ::pwrite(memory.fd, memory.hidden + at, memory.bytes - at, static_cast<off_t>(at));
        kept = n > 0;
        at += static_cast<uint64_t>(std::max<ssize_t>(n, 0));
    }
    const int access = PROT_READ | PROT_WRITE;
    kept = kept &&
           ::mmap(memory.hidden, memory.bytes, access, MAP_SHARED | MAP_FIXED, memory.fd, 0) != MAP_FAILED;
    void* page = ::mmap(nullptr, 4096, access, MAP_SHARED, memory.fd, mapped - 4096);
    void* alias =
        ::mmap(nullptr, memory.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!kept || page == MAP_FAILED || alias == MAP_FAILED) std::abort();
    memory.adopted = static_cast<SharedPage*>(page);
    if (::getrandom(&memory.page().secret, sizeof(uint64_t), 0) != sizeof(uint64_t)) std::abort();
    auto address = reinterpret_cast<uint64_t>(alias);
    state().card_memory[address] = std::move(memory);
    return address + offset;
}
char* soft_at(uint64_t address, uint64_t bytes) {
    std::lock_guard lock(state().mutex);
    uint64_t base = 0;
    const CardMemory* memory = state().find_card(address, &base);
    return memory != nullptr && address - base + bytes <= memory->bytes ? memory->hidden + (address - base)
                                                                        : nullptr;
}
int soft_priority(const void* stream) { return static_cast<const Stream*>(stream)->priority; }

}  // extern "C"
