// The driver: what an address is, memory of a card, pinned and managed memory.
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "call.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

namespace {

// The rights of the mapping that has an address, "" for none.
std::string rights_at(const void* data) {
    FILE* maps = std::fopen("/proc/self/maps", "r");
    char line[512], rights[8];
    unsigned long long begin = 0, end = 0, address = reinterpret_cast<uint64_t>(data);
    std::string found;
    while (maps != nullptr && std::fgets(line, sizeof(line), maps) != nullptr) {
        if (std::sscanf(line, "%llx-%llx %7s", &begin, &end, rights) == 3 && begin <= address &&
            address < end) {
            found = rights;
        }
    }
    if (maps != nullptr) std::fclose(maps);
    return found;
}

}  // namespace

extern "C" {

int cuPointerGetAttributes(unsigned count, int* attributes, void** values, uint64_t address) {
    Call call("cuPointerGetAttributes");
    if (call.code != 0) return call.code;
    if (!state().initialised) return cu::kNotInitialized;
    uint64_t base = 0;
    const CardMemory* card = state().find_card(address, &base);
    const HostMemory* host = card != nullptr ? nullptr : state().find_host(address, &base);
    bool is_known = card != nullptr || host != nullptr;
    int ordinal = card != nullptr ? card->card : host != nullptr ? host->card : -2;
    bool managed = host != nullptr && host->managed;
    for (unsigned i = 0; i < count; ++i) {
        switch (attributes[i]) {
            case cu::kAddressContext:
                *static_cast<void**>(values[i]) = is_known ? &state().contexts[ordinal] : nullptr;
                break;
            case cu::kAddressMemoryType:
                *static_cast<unsigned*>(values[i]) = card != nullptr || managed ? cu::kMemoryOfDevice
                                                     : host != nullptr          ? cu::kMemoryOfHost
                                                                                : 0;
                break;
            case cu::kAddressManaged:
                *static_cast<bool*>(values[i]) = managed;
                break;
            case cu::kAddressDevice:
                *static_cast<int*>(values[i]) = ordinal;
                break;
            case cu::kAddressRangeStart:
                *static_cast<uint64_t*>(values[i]) = is_known ? base : 0;
                break;
            case cu::kAddressRangeBytes:
                *static_cast<size_t*>(values[i]) = card != nullptr   ? card->bytes
                                                   : host != nullptr ? host->bytes
                                                                     : 0;
                break;
            default:
                return cu::kInvalidValue;
        }
    }
    return 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    Call call("cuMemAlloc", kContext | kUnsafe);
    if (call.code != 0) return call.code;
    State& s = state();
    if (bytes == 0) return cu::kInvalidValue;
    if (bytes > s.card_limit || s.card_bytes() > s.card_limit - bytes) return cu::kOutOfMemory;
    int fd = ::memfd_create("soft-device", MFD_CLOEXEC);
    uint64_t mapped = CardMemory::mapped(bytes);
    void *hidden = MAP_FAILED, *alias = MAP_FAILED;
    if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(mapped)) == 0) {
        hidden = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        alias = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (hidden == MAP_FAILED || alias == MAP_FAILED) {
        if (fd >= 0) ::close(fd);
        return cu::kOutOfMemory;
    }
    std::memset(hidden, 0xDB, bytes);
    *address = reinterpret_cast<uint64_t>(alias);
    CardMemory& memory = s.card_memory[*address];
    memory = {.bytes = bytes,
              .hidden = static_cast<char*>(hidden),
              .card = Call::current()->card,
              .fd = fd,
              .opened = nullptr};
    // Not of the policy's random numbers: two processes may have the same seed.
    if (::getrandom(&memory.page().secret, sizeof(uint64_t), 0) != sizeof(uint64_t)) return cu::kOutOfMemory;
    return 0;
}

// What still uses the memory finds it gone.
int cuMemFree_v2(uint64_t address) {
    Call call("cuMemFree", kContext | kUnsafe | kUndoes);
    if (call.code != 0) return call.code;
    if (auto managed = state().host_memory.find(address);
        managed != state().host_memory.end() && managed->second.managed) {
        ::munmap(reinterpret_cast<void*>(address), managed->second.bytes);
        state().host_memory.erase(managed);
        return state().broken;
    }
    auto found = state().card_memory.find(address);
    if (found == state().card_memory.end() || found->second.opened != nullptr) {
        state().violation("cuMemFree of no allocation");
        return cu::kInvalidValue;
    }
    found->second.page().freed = 1;
    found->second.unmap(address);
    state().last_card = nullptr;
    state().card_memory.erase(found);
    return state().broken;
}

int cuMemAllocManaged(uint64_t* address, size_t bytes, unsigned) {
    Call call("cuMemAllocManaged", kContext | kUnsafe);
    if (call.code != 0) return call.code;
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return cu::kOutOfMemory;
    *address = reinterpret_cast<uint64_t>(data);
    state().host_memory[*address] = {.bytes = bytes, .managed = true, .card = Call::current()->card};
    return 0;
}

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
    Call call("cuMemHostRegister", kContext | kUnsafe);
    if (call.code != 0) return call.code;
    State& s = state();
    bool read_only = (flags & cu::kRegisterReadOnly) != 0;
    std::string rights = rights_at(data);
    if (rights.empty() || rights[0] != 'r' || (rights[1] != 'w' && !read_only)) return cu::kInvalidValue;
    if (bytes > s.pinned_limit || s.pinned_bytes() > s.pinned_limit - bytes) return cu::kOutOfMemory;
    uint64_t begin = reinterpret_cast<uint64_t>(data), base = 0;
    auto next = s.host_memory.lower_bound(begin);
    if (s.find_host(begin, &base) != nullptr ||
        (next != s.host_memory.end() && next->first < begin + bytes)) {
        return cu::kHostMemoryAlreadyRegistered;
    }
    s.host_memory[begin] = {.bytes = bytes, .read_only = read_only, .card = Call::current()->card};
    return 0;
}

int cuMemHostUnregister(void* data) {
    Call call("cuMemHostUnregister", kContext | kUnsafe | kUndoes);
    if (call.code != 0) return call.code;
    if (state().host_memory.erase(reinterpret_cast<uint64_t>(data)) == 0) return cu::kHostMemoryNotRegistered;
    return state().broken;
}

}  // extern "C"
