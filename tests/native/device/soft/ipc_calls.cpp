// The driver: memory of a card that processes share. A handle names the memfd of an allocation by a process
// and a number there, and proves it by the secret behind the allocation's bytes. And memory of a card that
// other devices take: that memfd stands for the dma-buf, opened anew at the place where the range begins.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "call.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

namespace {

struct Handle {
    uint64_t secret, bytes;
    int32_t process, fd;
    int32_t card;  // of the machine
    char unused[36];
};
static_assert(sizeof(Handle) == sizeof(CuIpcMemory));

// The memory that was opened with that secret, or null.
std::pair<const uint64_t, CardMemory>* find_opened(uint64_t secret) {
    for (auto& entry : state().card_memory) {
        if (entry.second.opened != nullptr && entry.second.opened->secret == secret) return &entry;
    }
    return nullptr;
}

// Maps what the handle names; nothing of it is kept when it is not what it says.
int map_opened(const Handle& handle, int card, uint64_t* address) {
    std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
    int process = static_cast<int>(::syscall(SYS_pidfd_open, handle.process, 0));
    int fd = process >= 0 ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
    uint64_t mapped = CardMemory::mapped(handle.bytes);
    void *hidden = MAP_FAILED, *alias = MAP_FAILED;
    if (fd >= 0 && ::lseek(fd, 0, SEEK_END) == static_cast<off_t>(mapped)) {
        hidden = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        alias = ::mmap(nullptr, handle.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (fd >= 0) ::close(fd);
    CardMemory memory{
        .bytes = handle.bytes, .hidden = static_cast<char*>(hidden), .card = card, .opened = {}};
    bool sound = hidden != MAP_FAILED && alias != MAP_FAILED && memory.page().secret == handle.secret &&
                 memory.page().freed == 0;
    if (!sound) {
        if (hidden != MAP_FAILED) ::munmap(hidden, mapped);
        if (alias != MAP_FAILED) ::munmap(alias, handle.bytes);
        if (process >= 0) ::close(process);
        return cu::kInvalidValue;
    }
    memory.opened = std::make_shared<Opened>();
    memory.opened->process = process;
    memory.opened->count = 1;
    memory.opened->secret = handle.secret;
    *address = reinterpret_cast<uint64_t>(alias);
    state().card_memory[*address] = std::move(memory);
    return cu::kSuccess;
}

}  // namespace

extern "C" {

// Of the whole allocation, whatever part of it the address is in.
int cuIpcGetMemHandle(CuIpcMemory* handle, uint64_t address) {
    Call call("cuIpcGetMemHandle", kContext);
    if (call.code != 0) return call.code;
    uint64_t base = 0;
    const CardMemory* memory = state().find_card(address, &base);
    if (memory == nullptr || memory->fd < 0) return cu::kInvalidValue;
    Handle made{};
    made.secret = memory->page().secret;
    made.bytes = memory->bytes;
    made.process = ::getpid();
    made.fd = memory->fd;
    made.card = state().first_card + memory->card;
    std::memcpy(handle, &made, sizeof(made));
    return 0;
}

// The flag lets other cards of the process reach it, too.
int cuIpcOpenMemHandle_v2(uint64_t* address, CuIpcMemory given, unsigned flags) {
    Call call("cuIpcOpenMemHandle", kContext | kUnsafe);
    if (call.code != 0) return call.code;
    Handle handle{};
    std::memcpy(&handle, &given, sizeof(handle));
    if (flags != cu::kIpcLazyPeerAccess || handle.bytes == 0) return cu::kInvalidValue;
    if (handle.process == ::getpid()) return cu::kInvalidContext;
    int card = handle.card - state().first_card;
    if (card < 0 || card >= state().cards) return cu::kInvalidDevice;
    if (card != Call::current()->card) return cu::kInvalidContext;
    if (auto* known = find_opened(handle.secret)) {
        ++known->second.opened->count;
        *address = known->first;
        return 0;
    }
    return map_opened(handle, card, address);
}

// What still uses the memory finds it gone.
int cuIpcCloseMemHandle(uint64_t address) {
    Call call("cuIpcCloseMemHandle", kContext | kUnsafe | kUndoes);
    if (call.code != 0) return call.code;
    auto found = state().card_memory.find(address);
    if (found == state().card_memory.end() || found->second.opened == nullptr) {
        state().violation("cuIpcCloseMemHandle of no opened memory");
        return cu::kInvalidValue;
    }
    if (--found->second.opened->count > 0) return state().broken;
    found->second.unmap(address);
    state().last_card = nullptr;
    state().card_memory.erase(found);
    return state().broken;
}

int cuMemGetHandleForAddressRange(void* handle, uint64_t address, size_t bytes, int type,
                                  unsigned long long) {
    Call call("cuMemGetHandleForAddressRange", kContext);
    if (call.code != 0) return call.code;
    uint64_t base = 0;
    const CardMemory* memory = state().find_card(address, &base);
    if (memory == nullptr || memory->fd < 0 || type != cu::kRangeAsDmaBuf) return cu::kInvalidValue;
    const uint64_t pages = CardMemory::mapped(memory->bytes) - 4096;
    if (address % 4096 != 0 || bytes % 4096 != 0 || bytes > pages - (address - base))
        return cu::kInvalidValue;
    std::string path = "/proc/self/fd/" + std::to_string(memory->fd);
    int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return cu::kInvalidValue;
    (void)::lseek(fd, static_cast<off_t>(address - base), SEEK_SET);
    *static_cast<int*>(handle) = fd;
    return 0;
}
}  // extern "C"
