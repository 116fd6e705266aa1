// The driver: cards, contexts, the state of a thread.
#include <cstdio>
#include <cstring>

#include "call.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

extern "C" {

int cuInit(unsigned) {
    Call call("cuInit");
    if (call.code != 0) return call.code;
    state().initialised = true;
    return state().cards == 0 ? cu::kNoDevice : cu::kSuccess;
}

int cuDriverGetVersion(int* version) {
    Call call("cuDriverGetVersion");
    *version = state().version;
    return call.code;
}

int cuGetErrorString(int code, const char** text) {
    Call call("cuGetErrorString");
    *text = code == cu::kIllegalAddress ? "an illegal memory access was encountered" : "soft device";
    return call.code;
}

int cuDeviceGetCount(int* count) {
    Call call("cuDeviceGetCount");
    if (!state().initialised) return cu::kNotInitialized;
    *count = state().cards;
    return call.code;
}

int cuDeviceGet(int* device, int ordinal) {
    Call call("cuDeviceGet");
    if (call.code == 0 && (ordinal < 0 || ordinal >= state().cards)) return cu::kInvalidDevice;
    *device = ordinal;
    return call.code;
}

int cuDeviceGetName(char* name, int bytes, int) {
    Call call("cuDeviceGetName");
    std::snprintf(name, static_cast<size_t>(bytes), "Soft device");
    return call.code;
}

int cuDeviceGetUuid_v2(CuUuid* uuid, int device) {
    Call call("cuDeviceGetUuid");
    std::memset(uuid->bytes, 0x50 + state().first_card + device, sizeof(uuid->bytes));
    return call.code;
}

int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
    Call call("cuDeviceGetPCIBusId");
    std::snprintf(id, static_cast<size_t>(bytes), "FFFF:A%d:00.0", device);
    return call.code;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    Call call("cuDeviceTotalMem");
    *bytes = 1u << 30;
    return call.code;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    Call call("cuDeviceGetAttribute");
    if (call.code != 0) return call.code;
    switch (attribute) {
        case cu::kMultiprocessors:
            *value = 4;
            return 0;
        case cu::kCopyEngines:
            *value = 2;
            return 0;
        case cu::kComputeMajor:
            *value = state().capability / 10;
            return 0;
        case cu::kComputeMinor:
            *value = state().capability % 10;
            return 0;
        case cu::kNicWritesOrdering:
            *value = state().capability >= 80 ? cu::kNicWritesOrderedForOwner : 0;
            return 0;
        case cu::kReadOnlyHostRegister:
            *value = 1;
            return 0;
        case cu::kHostNumaNode:
            *value = 0;
            return 0;
        default:
            return cu::kInvalidValue;
    }
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
    Call call("cuDevicePrimaryCtxRetain");
    if (call.code != 0) return call.code;
    *context = &state().contexts[device];
    (*context)->card = device;
    ++(*context)->retained;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    Call call("cuDevicePrimaryCtxRelease");
    if (call.code == 0) --state().contexts[device].retained;
    return call.code;
}

int cuCtxPushCurrent_v2(Context* context) {
    Call call("cuCtxPushCurrent");
    if (call.code == 0) this_thread().contexts.push_back(context);
    return call.code;
}

int cuCtxPopCurrent_v2(Context** context) {
    Call call("cuCtxPopCurrent");
    if (this_thread().contexts.empty()) return cu::kInvalidContext;
    *context = this_thread().contexts.back();
    this_thread().contexts.pop_back();
    return call.code;
}

int cuCtxGetCurrent(Context** context) {
    Call call("cuCtxGetCurrent");
    *context = Call::current();
    return call.code;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    Call call("cuCtxGetStreamPriorityRange", kContext);
    *least = 0;
    *greatest = -5;
    return call.code;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
    Call call("cuThreadExchangeStreamCaptureMode");
    if (call.code == 0) std::swap(*mode, this_thread().capture_mode);
    return call.code;
}

}  // extern "C"
