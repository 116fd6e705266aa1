// The CUDA driver's interface as far as this layer uses it, in declarations of our own: building needs no
// header of CUDA. Numbers and layouts are those of cuda.h, which NVIDIA keeps stable between versions; a
// device address is an integer, so that no C++ code can load from it by accident.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool::device {

struct CuContext;
struct CuStream;
struct CuEvent;
struct CuModule;
struct CuFunction;

struct CuUuid {
    unsigned char bytes[16];
};
struct CuIpcMemory {
    unsigned char bytes[64];
};
// CUmemLocation and CUmemcpyAttributes.
struct CuLocation {
    int type = 0;  // 0: no hint
    int id = 0;
};
struct CuCopyAttributes {
    int source_order = 1;
    CuLocation source, target;
    unsigned flags = 0;
};
static_assert(sizeof(CuCopyAttributes) == 24);

namespace cu {

// CUresult
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kNotInitialized = 3;
inline constexpr int kDeinitialized = 4;
inline constexpr int kNoDevice = 100;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidContext = 201;
inline constexpr int kEccUncorrectable = 214;
inline constexpr int kInvalidPtx = 218;
inline constexpr int kNotFound = 500;
inline constexpr int kNotReady = 600;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kHostMemoryAlreadyRegistered = 712;
inline constexpr int kHostMemoryNotRegistered = 713;
inline constexpr int kLaunchFailed = 719;
inline constexpr int kNotPermitted = 800;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kCaptureInvalidated = 901;

// CUdevice_attribute
inline constexpr int kMultiprocessors = 16;
inline constexpr int kCopyEngines = 40;
inline constexpr int kComputeMajor = 75;
inline constexpr int kComputeMinor = 76;
inline constexpr int kReadOnlyHostRegister = 113;
inline constexpr int kNicWritesOrdering = 118;
inline constexpr int kHostNumaNode = 134;

// CUpointer_attribute, and CUmemorytype
inline constexpr int kAddressContext = 1;
inline constexpr int kAddressMemoryType = 2;
inline constexpr int kAddressManaged = 8;
inline constexpr int kAddressDevice = 9;
inline constexpr int kAddressRangeStart = 11;
inline constexpr int kAddressRangeBytes = 12;
inline constexpr unsigned kMemoryOfHost = 1;
inline constexpr unsigned kMemoryOfDevice = 2;

// Flags and modes
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kRegisterPortable = 1;
inline constexpr unsigned kRegisterReadOnly = 8;
inline constexpr unsigned kIpcLazyPeerAccess = 1;
inline constexpr int kRangeAsDmaBuf = 1;
inline constexpr int kNicWritesOrderedForOwner = 100;
inline constexpr int kCaptureModeGlobal = 0;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kJitErrorLog = 5;
inline constexpr int kJitErrorLogBytes = 6;

}  // namespace cu

}  // namespace moonpool::device
