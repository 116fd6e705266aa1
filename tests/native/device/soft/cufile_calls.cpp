// GPUDirect Storage: libcufile's functions as core/csrc/transport/cufile/library.hpp declares them, between a
// file and the software card's memory.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "call.hpp"

using namespace moonpool::soft;

namespace {

struct FileError {
    int code, cuda;
};
struct FileDescriptor {
    int type;
    union {
        int fd;
        void* handle;
    } file;
    const void* operations;
};

// -> bytes, or what cuFileRead and cuFileWrite answer for an error.
template <class Move>
ssize_t move(const char* name, const void* base, size_t bytes, off_t in_memory, Move move) {
    Call call(name, kContext);
    if (call.code != 0) return -call.code;
    uint64_t begin = 0, address = reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(in_memory);
    const CardMemory* memory = state().find_card(address, &begin);
    if (memory == nullptr || address - begin + bytes > memory->bytes) {
        state().violation(std::string(name) + " of what is no memory of a card");
        return -5000;
    }
    return move(memory->hidden + (address - begin));
}

}  // namespace

extern "C" {

FileError cuFileDriverOpen() { return {Call("cuFileDriverOpen").code, 0}; }

FileError cuFileHandleRegister(void** handle, FileDescriptor* descriptor) {
    Call call("cuFileHandleRegister");
    if (call.code != 0) return {call.code, 0};
    int flags = ::fcntl(descriptor->file.fd, F_GETFL);
    if (descriptor->type != 1 || flags < 0 || (flags & O_DIRECT) == 0) return {5022, 0};
    std::string again = "/proc/self/fd/" + std::to_string(descriptor->file.fd);
    *handle = new int(::open(again.c_str(), flags & O_ACCMODE));
    return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
    ::close(*static_cast<int*>(handle));
    delete static_cast<int*>(handle);
}

ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t in_file, off_t in_memory) {
    return move("cuFileRead", base, bytes, in_memory,
                [&](char* memory) { return ::pread(*static_cast<int*>(handle), memory, bytes, in_file); });
}

ssize_t cuFileWrite(void* handle, const void* base, size_t bytes, off_t in_file, off_t in_memory) {
    return move("cuFileWrite", base, bytes, in_memory,
                [&](char* memory) { return ::pwrite(*static_cast<int*>(handle), memory, bytes, in_file); });
}

}  // extern "C"
