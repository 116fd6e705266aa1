#include "transport/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

namespace moonpool::transport {

namespace {

constexpr uint64_t kStepBytes = 256u << 20;

Status check_left(uint64_t bytes, uint64_t left, const AskAvailable& ask) {
    std::optional<AvailableMemory> memory = ask();
    // Of what is left a little is for the tables of pages and for other processes.
    if (memory && left > memory->available_bytes - memory->available_bytes / 64) {
        return Error{Code::kTooLarge,
                     std::to_string(bytes) + " bytes of memory cannot be had: of " + std::to_string(left) +
                         " that are still to be reserved " + memory->limited_by + " leaves " +
                         std::to_string(memory->available_bytes) + "; ask for less, or end what takes it"};
    }
    return success();
}

// The kernel promises more than it has, and ends a process, perhaps another one, when the promise falls due.
// So it is asked before each step: others take memory, too.
Status reserve(int fd, uint64_t bytes, const AskAvailable& ask) {
    for (uint64_t done = 0; done < bytes;) {
        uint64_t left = bytes - done;
        if (Status room = check_left(bytes, left, ask); !room) return room;
        uint64_t step = std::min(left, kStepBytes);
        if (::fallocate(fd, 0, static_cast<off_t>(done), static_cast<off_t>(step)) != 0) {
            return os_error("reserving " + std::to_string(bytes) + " bytes of memory");
        }
        done += step;
    }
    return success();
}

// What a node has free; the kernel ends a process for what is beyond it. Nothing: it does not tell.
std::optional<uint64_t> free_bytes_of(uint32_t node) {
    std::ifstream in("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
    std::string word;
    uint64_t kib = 0;
    while (in >> word) {
        if (word == "MemFree:" && in >> kib) return kib << 10;
    }
    return std::nullopt;
}

// By the system call: no libnuma is needed. Shared memory keeps the policy for each process that maps it.
Status bind_to_node(const Mapping& mapping, uint32_t node) {
    constexpr unsigned long kBind = 2;  // MPOL_BIND
    constexpr size_t kBits = 8 * sizeof(unsigned long);
    unsigned long nodes[1024 / kBits] = {};
    if (node < 1024) {
        nodes[node / kBits] = 1ul << (node % kBits);
        if (::syscall(SYS_mbind, mapping.data(), mapping.size(), kBind, nodes, 1024 + 1, 0) == 0) {
            return success();
        }
    } else {
        errno = EINVAL;
    }
    return Error{Code::kInvalidArgument, "memory of NUMA node " + std::to_string(node) +
                                             " cannot be had: " + std::strerror(errno) +
                                             "; /sys/devices/system/node/has_memory lists the nodes"};
}

}  // namespace

Result<std::shared_ptr<Memory>> Memory::create(uint64_t bytes, const AskAvailable& ask,
                                               std::optional<uint32_t> node) {
    if (bytes == 0 || bytes > (uint64_t{1} << 46)) {
        return Error{Code::kInvalidArgument, "memory of " + std::to_string(bytes) + " bytes cannot be had"};
    }
    bytes = round_up_to_page(bytes);
    auto ask_node = [&]() -> std::optional<AvailableMemory> {
        std::optional<AvailableMemory> found = ask();
        std::optional<uint64_t> left = node ? free_bytes_of(*node) : std::nullopt;
        if (!left || (found && found->available_bytes <= *left)) return found;
        return AvailableMemory{*left, *left, "NUMA node " + std::to_string(*node)};
    };
    if (Status room = check_left(bytes, bytes, ask_node); !room) return room.error();
    auto memory = std::make_shared<Memory>();
    memory->fd_.reset(::memfd_create("moonpool-engine", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!memory->fd_.valid()) return os_error("memfd_create");
    if (::ftruncate(memory->fd_.get(), static_cast<off_t>(bytes)) != 0) {
        return os_error("ftruncate of a memfd");
    }
    Result<Mapping> mapping = Mapping::map(memory->fd_.get(), bytes, true);
    if (!mapping) return mapping.error();
    memory->mapping_ = std::move(*mapping);
    if (node) {
        if (Status bound = bind_to_node(memory->mapping_, *node); !bound) return bound.error();
    }
    ::madvise(memory->data(), bytes, MADV_HUGEPAGE);  // before the pages exist; where the system allows it
    // Reserved, not only promised: a page that cannot be had later would be a SIGBUS in the thread that
    // touched it, here or in a peer.
    if (Status status = reserve(memory->fd_.get(), bytes, ask_node); !status) return status.error();
    // Its length is fixed for the same reason.
    if (::fcntl(memory->fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return os_error("sealing a memfd");
    }
    memory->mapping_.populate_for_write(0, bytes);
    memory->size_ = bytes;
    return memory;
}

Result<std::shared_ptr<Memory>> Memory::create_on(const DaxDevice& device, uint64_t bytes) {
    if (bytes == 0 || bytes > (uint64_t{1} << 46)) {
        return Error{Code::kInvalidArgument, "memory of " + std::to_string(bytes) + " bytes cannot be had"};
    }
    Result<std::unique_ptr<DaxMemory>> dax = DaxMemory::create(device, round_up_to_page(bytes));
    if (!dax) return dax.error();
    auto memory = std::make_shared<Memory>();
    memory->size_ = round_up_to_page(bytes);
    memory->dax_ = std::move(*dax);
    return memory;
}

}  // namespace moonpool::transport
