#include "memory/mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <utility>

#include "memory/seal.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace moonpool {

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

Result<Mapping> Mapping::map(int fd, uint64_t bytes, bool writable) {
    // A huge page is mapped as one only where address and offset agree modulo its size: take a range that is
    // larger, map over its aligned part, and give the rest back.
    uint64_t slack = bytes >= kHugePageBytes ? kHugePageBytes : 0;
    uint64_t length = round_up_to_page(bytes);
    void* range =
        ::mmap(nullptr, length + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return os_error("mmap of " + std::to_string(bytes) + " bytes of address space");
    auto* begin = static_cast<std::byte*>(range);
    uint64_t ahead = slack == 0 ? 0 : -reinterpret_cast<uint64_t>(begin) % kHugePageBytes;
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* address = ::mmap(begin + ahead, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (address == MAP_FAILED) {
        Error error = os_error("mmap of " + std::to_string(bytes) + " bytes of shared memory");
        ::munmap(range, length + slack);
        return error;
    }
    if (ahead != 0) ::munmap(begin, ahead);
    if (slack != ahead) ::munmap(begin + ahead + length, slack - ahead);
    Mapping mapping;
    mapping.data_ = static_cast<std::byte*>(address);
    mapping.size_ = bytes;
    return mapping;
}

Status Mapping::protect(uint64_t offset, uint64_t bytes, bool writable) {
    if (::mprotect(data_ + offset, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ) != 0) {
        return os_error("mprotect of a slab");
    }
    return success();
}

void Mapping::populate_for_write(uint64_t offset, uint64_t bytes) {
    // Only a hint: kernels before 5.14 do not know it and fault page by page.
    ::madvise(data_ + offset, bytes, MADV_POPULATE_WRITE);
}

bool Mapping::collapse(uint64_t offset, uint64_t bytes) {
    return ::madvise(data_ + offset, bytes, MADV_COLLAPSE) == 0;
}

Result<Arena> Arena::create(const std::string& name, uint64_t bytes) {
    Arena arena;
    arena.fd_.reset(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!arena.fd_.valid()) return os_error("memfd_create");
    if (::ftruncate(arena.fd_.get(), static_cast<off_t>(bytes)) != 0) return os_error("ftruncate of a memfd");
    if (Status status = keep_private(arena.fd_.get()); !status) return status.error();
    if (Status status = seal_memory(arena.fd_.get(), false); !status) return status.error();
    Result<Mapping> mapping = Mapping::map(arena.fd_.get(), bytes, true);
    if (!mapping) return mapping.error();
    arena.mapping_ = std::move(*mapping);
    return arena;
}

Result<Arena> Arena::adopt(Fd fd, uint64_t bytes, uint64_t committed) {
    struct stat file {};
    const int seals = ::fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &file) != 0 ||
        static_cast<uint64_t>(file.st_size) != bytes || committed > bytes) {
        return Error{Code::kProtocol, "the running node's memory is not what it describes"};
    }
    Result<Mapping> mapping = Mapping::map(fd.get(), bytes, true);
    if (!mapping) return mapping.error();
    Arena arena;
    arena.fd_ = std::move(fd);
    arena.mapping_ = std::move(*mapping);
    arena.committed_ = committed;
    return arena;
}

Status Arena::commit(uint64_t bytes) {
    if (Status status = commit_range(committed_, bytes); !status) return status;
    committed_ += bytes;
    return success();
}

Status Arena::commit_range(uint64_t offset, uint64_t bytes) {
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
        return os_error("reserving " + std::to_string(bytes) + " bytes of memory for the arena");
    }
    return success();
}

Status Arena::give_back(uint64_t offset, uint64_t bytes) {
    if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes)) != 0) {
        return os_error("giving back " + std::to_string(bytes) + " bytes of the arena's memory");
    }
    return success();
}

}  // namespace moonpool
