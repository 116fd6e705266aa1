// libcufile (GPUDirect Storage), opened when it is first asked for: the few functions that transfers use, by
// our own declarations. Nothing is linked.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/result.hpp"

namespace moonpool::transport::cufile {

// CUfileError_t, returned by value.
struct CallError {
    int code = 0;  // CUfileOpError, 0: success
    int cuda = 0;  // CUresult
};

// CUfileDescr_t
struct Descriptor {
    int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
    union {
        int fd;
        void* handle;
    } file{};
    const void* operations = nullptr;
};
static_assert(sizeof(Descriptor) == 24);

struct Library {
    CallError (*cuFileDriverOpen)() = nullptr;
    CallError (*cuFileHandleRegister)(void** handle, Descriptor* descriptor) = nullptr;
    void (*cuFileHandleDeregister)(void* handle) = nullptr;
    // -> bytes; -1: errno says why, below: minus a CUfileOpError.
    ssize_t (*cuFileRead)(void* handle, void* base, size_t bytes, off_t in_file, off_t in_memory) = nullptr;
    ssize_t (*cuFileWrite)(void* handle, const void* base, size_t bytes, off_t in_file,
                           off_t in_memory) = nullptr;

    // The error says in one sentence why there is none.
    static Result<const Library*> get();
    // Its driver, once in a process.
    Status open_driver() const;
    // "": libcufile.so.0. Engines that were made before keep what they had.
    static void use_library_for_tests(const std::string& path);
};

}  // namespace moonpool::transport::cufile
